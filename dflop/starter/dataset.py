"""What the rows of a dataset name: media of which kinds, keys, and the folder that most of their media are under.

Rows are read as training would read them, a few from all over the first file of every part.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef, confine
from dflop.data.card import DatasetCard, read_card
from dflop.data.formats.source import open_source
from dflop.data.frame_files import PICTURES, NoRate
from dflop.data.model_tokenizer import NUM_LOOKED_AT
from dflop.errors import ConfigError

WITHOUT_RATE = "without a rate"
_MEDIA_FOLDERS = ("media", "images", "image", "videos", "video", "audio", "audios", "data")


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """What training would read, and what a look at its rows tells."""

    card: DatasetCard
    num_looked_at: int
    num_bad: int
    """Bad rows among the sampled ones."""
    first_reason: str
    """Why the first bad one is bad."""
    kinds: Mapping[str, int]
    """Rows with media of a kind, of those looked at."""
    media_root: Path
    num_media: int
    """Named by the rows looked at, outside the file itself."""
    num_media_found: int
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    """Rows, of those looked at, that have a key nobody is known to read."""
    refused_keys: Mapping[str, int] = field(default_factory=dict)
    """Rows, of those looked at, that are bad because of a key."""
    frames: Mapping[str, int] = field(default_factory=dict)
    """Videos that lie as pictures, of the rows looked at, by how: lists, folders, or either without a rate."""

    @property
    def num_good(self) -> float:
        """Rows that make sense, as far as those looked at tell."""
        return self.card.num_rows * (1 - self.num_bad / max(self.num_looked_at, 1))


def find_dataset(path: Path, split: str = "") -> FoundDataset:
    """The dataset at a path, as `read_card` finds it, and what a look at its rows tells.

    Raises:
        ConfigError: there is nothing at the path, nothing that could be read as training data, or it is open what is
            meant.
    """
    try:
        if not path.exists() and not set("{*?[") & set(str(path)):
            raise ConfigError(f"`{path}` does not exist", where="--data", hint=f"the working directory is {Path.cwd()}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"`{path}` is neither a file nor a folder", where="--data")
        if path.is_dir():
            os.listdir(path)  # walking takes a folder that cannot be read for an empty one
    except OSError as error:
        raise ConfigError(f"`{str(path)[:200]}` cannot be read: {error.strerror}", where="--data") from error
    return _judge(read_card(path, split), path)


def _judge(card: DatasetCard, given: Path) -> FoundDataset:
    num_looked_at, reasons, samples = 0, list[str](), list[AnnotatedSample]()
    refused, frames = Counter[str](), Counter[str]()
    rooted: list[tuple[Path, MediaRef]] = []
    free: list[MediaRef] = []
    for part in card.taken:
        source = open_source(part.entry.paths[0], mapping=part.entry.mapping)
        looked_at = source.spread(NUM_LOOKED_AT)
        num_looked_at += len(looked_at)
        for index in looked_at:
            try:
                sample = source.sample(index)
            except BadSample as error:
                reasons.append(f"row {index}: {error.reason}")
                refused.update([error.key] if error.key else [])
                frames.update([WITHOUT_RATE] if isinstance(error, NoRate) else [])
                continue
            samples.append(sample)
            refs = [ref for ref in sample.media if not source.embeds(ref)]
            frames.update("folder" if _is_folder(ref) else "list" for ref in refs if ref.frames)
            named = [found for ref in refs for found in _named(ref)]
            rooted += [(part.entry.media_root, ref) for ref in named if part.is_rooted]
            free += [] if part.is_rooted else named
    root, num_found = _media_root(free, card.taken[0].entry.paths[0].parent, given)
    if not free and rooted:
        root = rooted[0][0]
    refs_by_root = [*rooted, *((root, ref) for ref in free)]
    frames.update(
        WITHOUT_RATE
        for folder, ref in refs_by_root
        if ref.kind == "video" and not ref.frames and _lies_under(folder, ref, as_folder=True)
    )
    unknown = Counter(key for sample in samples for key in sample.unknown_keys)
    kinds = Counter(kind for sample in samples for kind in sorted({ref.kind for ref in sample.media}))
    num_found += sum(_lies_under(*found) for found in rooted)
    return FoundDataset(
        card, num_looked_at, len(reasons), reasons[0] if reasons else "no rows", dict(kinds),
        root, len(refs_by_root), num_found, dict(unknown), dict(refused), dict(frames),
    )  # fmt: skip


def _media_root(refs: Sequence[MediaRef], folder: Path, given: Path) -> tuple[Path, int]:
    """The folder under which most of the media are, and how many those are; `folder` where there are none."""
    start = given if given.is_dir() else folder
    bases = list(dict.fromkeys([folder, start, folder.parent]))
    below = [base / name for base in bases for name in _MEDIA_FOLDERS]
    inside = [path for path in sorted(start.iterdir()) if path.is_dir()][:50] if start.is_dir() else []
    absolute = [ref.path for ref in refs if os.path.isabs(ref.path)]
    common = [Path(os.path.commonpath(list(map(os.path.dirname, absolute))))] if absolute else []
    candidates = [path for path in dict.fromkeys([*bases, *below, *inside, *common]) if path.is_dir()]
    counts = {path: sum(_lies_under(path, ref) for ref in refs) for path in candidates}
    best = max(candidates, key=lambda path: counts[path], default=folder)
    return (best, counts[best]) if refs and counts.get(best) else (folder, 0)


def _named(ref: MediaRef) -> Iterator[MediaRef]:
    """What of an item is looked for: of frames the first and the last."""
    if not ref.frames:
        yield ref
    for path in dict.fromkeys((*ref.frames[:1], *ref.frames[-1:])):
        yield MediaRef(ref.kind, path, (path,))


def _is_folder(ref: MediaRef) -> bool:
    return len(ref.frames) == 1 and not ref.frames[0].lower().endswith(PICTURES)


def _lies_under(root: Path, ref: MediaRef, *, as_folder: bool = False) -> bool:
    try:
        path = confine(root, ref.path)
        return path.is_dir() if as_folder or (ref.kind == "video" and not path.is_file()) else path.is_file()
    except (BadSample, OSError):
        return False
