"""What lies at a path: which file holds the rows, in which format, and which folder their media are relative to.

Rows are read as training would read them, a few from all over the file. The file with the most rows that make sense is
taken; the media root is the folder under which most of their media are found.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflop.config import load_mixture
from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef, confine
from dflop.data.formats.annotation_file import SUFFIXES
from dflop.data.formats.row_source import RowSource
from dflop.data.formats.source import open_source
from dflop.data.frame_folders import PICTURES, NoRate
from dflop.data.model_tokenizer import NUM_LOOKED_AT
from dflop.data.patterns import expand, relative_to
from dflop.errors import ConfigError, DataError

WITHOUT_RATE = "without a rate"
_MAX_FILES = 2000
_MEDIA_FOLDERS = ("media", "images", "image", "videos", "video", "audio", "audios", "data")
_MIXTURES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """A file, or several of one name but for a number, whose rows training could read."""

    annotations: str
    """Path, or a pattern of several."""
    format: str
    num_rows: int
    num_looked_at: int
    num_bad: int
    """Of those looked at."""
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
    others: tuple[str, ...] = field(default=())
    """Files that could also have been taken, best first."""

    @property
    def num_good(self) -> float:
        """Rows that make sense, as far as those looked at tell."""
        return self.num_rows * (1 - self.num_bad / max(self.num_looked_at, 1))


def find_dataset(path: Path) -> FoundDataset:
    """The dataset at a path.

    Args:
        path: A file of rows, or a folder that holds one somewhere within two levels.

    Raises:
        ConfigError: there is nothing at the path, or nothing that could be read as training data.
    """
    try:
        if not path.exists():
            raise ConfigError(f"`{path}` does not exist", where="--data", hint=f"the working directory is {Path.cwd()}")
        is_file = path.is_file()
        if not is_file and not path.is_dir():
            raise ConfigError(f"`{path}` is neither a file nor a folder", where="--data")
        if not is_file:
            os.listdir(path)  # globbing takes a folder that cannot be read for an empty one
    except OSError as error:
        raise ConfigError(f"`{str(path)[:200]}` cannot be read: {error.strerror}", where="--data") from error
    groups = [(path,)] if is_file else list(_groups(path))
    looked_at = [found for files in groups if (found := _look(files, path)) is not None]
    # Rows that a key alone makes bad are training data: which keys they can do without is for a person to say.
    usable = (found for found in looked_at if found.num_good > 0 or found.refused_keys)
    judged = sorted(usable, key=lambda found: -found.num_good)
    if not judged:
        reasons = "; ".join(f"{found.annotations}: {found.first_reason}" for found in looked_at[:3])
        raise ConfigError(
            f"no training data at `{path}`" + (f": {reasons}" if reasons else ""),
            where="--data",
            hint=f"rows in {', '.join(SUFFIXES)}, .parquet or .tar, as docs/formats.md describes",
        )
    return replace(judged[0], others=tuple(found.annotations for found in judged[1:]))


def _groups(folder: Path) -> Iterator[tuple[Path, ...]]:
    """Files that may hold rows; those whose names differ in one number alone belong together."""
    found: dict[tuple[Path, str], list[Path]] = {}
    for number, path in enumerate(_files(folder)):
        if number >= _MAX_FILES:
            break
        found.setdefault((path.parent, re.sub(r"\d+", "#", path.name)), []).append(path)
    for (parent, _), files in found.items():
        if len(files) > 1 and _pattern(files) is not None and files[0].suffix not in _MIXTURES:
            yield tuple(files)
        else:
            yield from ((parent / path.name,) for path in files)


def _files(folder: Path) -> Iterator[Path]:
    for depth in ("*", "*/*", "*/*/*"):
        for path in sorted(folder.glob(depth)):
            is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if is_hidden or not path.name.endswith((*SUFFIXES, ".parquet", ".tar", *_MIXTURES)):
                continue
            try:
                if not path.is_file():
                    continue
            except OSError:
                pass  # opening it gives the reason
            yield path


def _pattern(files: Sequence[Path]) -> str | None:
    """One glob for files whose names differ in one number alone; None where that also takes others."""
    common = re.sub(r"\d+", "*", files[0].name)
    pattern = files[0].parent / (common if common.count("*") == 1 else re.sub(r"\d", "?", files[0].name))
    taken = sorted(files[0].parent.glob(pattern.name))
    return str(pattern) if taken == sorted(files) else None


def _look(files: tuple[Path, ...], given: Path) -> FoundDataset | None:
    """What a file, or the first of several alike, holds; None for a YAML file that is no mixture."""
    name = str(files[0]) if len(files) == 1 else str(_pattern(files))
    try:
        if files[0].suffix in _MIXTURES:
            return _look_at_mixture(files[0], given)
        source = open_source(files[0])
    except (ConfigError, DataError) as error:
        if files[0].suffix in _MIXTURES and files[0] != given:
            return None
        return FoundDataset(name, _format(files[0]), 0, 1, 1, error.what, {}, given, 0, 0)
    return _judge(name, _format(files[0]), source, len(source) * len(files), files[0].parent, given)


def _look_at_mixture(path: Path, given: Path) -> FoundDataset | None:
    folder, found = path.absolute().parent, []
    for entry in load_mixture(path).datasets:
        files = expand(entry.path, folder)
        source = open_source(files[0])
        root = relative_to(entry.media_root, folder) if entry.media_root else source.path.parent
        found.append(_judge(str(path), "mixture", source, len(source) * len(files), root, given))
    return replace(
        next((one for one in found if one.num_media_found), found[0]),
        num_rows=sum(one.num_rows for one in found),
        num_looked_at=sum(one.num_looked_at for one in found),
        num_bad=sum(one.num_bad for one in found),
        first_reason=next((one.first_reason for one in found if one.num_bad), "no rows"),
        kinds=_sum(one.kinds for one in found),
        num_media=sum(one.num_media for one in found),
        num_media_found=sum(one.num_media_found for one in found),
        unknown_keys=_sum(one.unknown_keys for one in found),
        refused_keys=_sum(one.refused_keys for one in found),
        frames=_sum(one.frames for one in found),
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _judge(name: str, form: str, source: RowSource, num_rows: int, folder: Path, given: Path) -> FoundDataset:
    step = max(1, len(source) // NUM_LOOKED_AT)
    looked_at = range(0, len(source), step)[:NUM_LOOKED_AT]
    samples: list[AnnotatedSample] = []
    reasons: list[str] = []
    refused: Counter[str] = Counter()
    frames: Counter[str] = Counter()
    for index in looked_at:
        try:
            samples.append(source.sample(index))
        except BadSample as error:
            reasons.append(f"row {index}: {error.reason}")
            refused.update([error.key] if error.key else [])
            frames.update([WITHOUT_RATE] if isinstance(error, NoRate) else [])
    refs = [ref for sample in samples for ref in sample.media if not source.embeds(ref)]
    frames.update("folder" if _is_folder(ref) else "list" for ref in refs if ref.frames)
    refs = [named for ref in refs for named in _named(ref)]
    root, num_found = _media_root(refs, folder, given)
    videos = [ref for ref in refs if ref.kind == "video" and not ref.frames]
    frames.update(WITHOUT_RATE for ref in videos if _lies_under(root, ref, as_folder=True))
    unknown = Counter(key for sample in samples for key in sample.unknown_keys)
    kinds = Counter(kind for sample in samples for kind in sorted({ref.kind for ref in sample.media}))
    return FoundDataset(
        name, form, num_rows, len(looked_at), len(reasons), reasons[0] if reasons else "no rows", dict(kinds),
        root, len(refs), num_found, dict(unknown), dict(refused), dict(frames),
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


def _format(path: Path) -> str:
    by_suffix = {".parquet": "Parquet", ".tar": "WebDataset tar"}
    return by_suffix.get(path.suffix, "JSON Lines" if ".jsonl" in path.name else "JSON")
