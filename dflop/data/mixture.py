"""A training set from many files: which rows of which, numbered one after the other.

An entry is one or more files whose rows follow each other, where their media lie, and which of the rows take part: a
number or a share from the start, from the end, or at random, with the words LLaVA-NeXT uses. What is chosen at random
depends on the seed, the entry's name and the number of rows, so every machine chooses the same.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef, confine
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.formats.row_source import RowSource
from dflop.data.formats.source import open_source
from dflop.data.frame_files import AnySource, FrameFiles
from dflop.data.ledger import MediaFolder
from dflop.data.path_patterns import expand, relative_to
from dflop.errors import ConfigError

_STRATEGY = re.compile(r"all|(first|end|random):(?:(\d+)|(\d+(?:\.\d+)?)%)", re.ASCII)
_STRATEGIES = "all, first:N, first:P%, end:N, end:P%, random:N, random:P%"


@dataclass(frozen=True, slots=True)
class MixtureEntry:
    """Rows of one or more files."""

    name: str
    """As a person wrote it; part of what `random` draws from."""
    paths: tuple[Path, ...]
    media_root: Path
    strategy: str = "all"
    """Which rows, counted over all files of the entry."""
    weight: float | None = None
    """Share of the entry in the samples drawn, relative to the other entries; None: as large as its rows are many."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of rows, messages and parts that may be ignored besides those of `row_keys.py`."""
    mapping: RowMapping | None = None
    """How rows are written, where an index says so; None: as the names of the files say."""


def make_entry(pattern: str, media_root: Path, folder: Path, strategy: str = "all") -> MixtureEntry:
    """Entry of the files that `pattern` stands for.

    Args:
        pattern: A path, or one with braces (`{a,b}`, `{000..012}`) or a glob (`*`, `?`, `[`) in it.
        media_root: Folder that the paths of media are relative to.
        folder: Where relative paths are looked up that the working directory does not have.
        strategy: See `select`.

    Raises:
        ConfigError: there is no such file.
    """
    return MixtureEntry(os.path.basename(pattern), expand(pattern, folder), relative_to(media_root, folder), strategy)


def select(num_rows: int, strategy: str, seed: int = 0, name: str = "") -> npt.NDArray[np.int64]:
    """Which of `num_rows` rows take part, in order.

    Args:
        num_rows: Rows there are.
        strategy: `all`, or `first:`, `end:` or `random:` with a number of rows or a percentage, rounded up to rows.
            More rows than there are is all of them.
        seed: 0 .. 2**64 - 1; for `random`, which of two counts takes the smaller is part of the larger.
        name: Name of the entry, for `random`.

    Raises:
        ConfigError: unknown strategy, or more than 100%.
    """
    match = _STRATEGY.fullmatch(strategy)
    share = Fraction(match[3]) / 100 if match and match[3] else None
    if match is None or (share or 0) > 1:
        raise ConfigError(f"unknown sampling strategy `{strategy}`", where=name, hint=f"valid: {_STRATEGIES}")
    if match[1] is None:
        return np.arange(num_rows)
    count = min(num_rows, int(match[2])) if share is None else math.ceil(num_rows * share)
    if match[1] == "first":
        return np.arange(count)
    if match[1] == "end":
        return np.arange(num_rows - count, num_rows)
    stream = int.from_bytes(hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:8], "little")
    keys = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(num_rows)
    return np.sort(np.argsort(keys, kind="stable")[:count])


class Dataset:
    """The chosen rows of all entries as samples 0 .. len - 1, in order of entries and rows."""

    def __init__(
        self,
        entries: Sequence[MixtureEntry],
        sources: Sequence[Sequence[RowSource]],
        rows: Sequence[npt.NDArray[np.int64]],
    ) -> None:
        self.entries = tuple(entries)
        self._sources = sources
        self._rows = rows
        self._starts = np.cumsum([0, *map(len, rows)])
        self._source_starts = [np.cumsum([0, *map(len, of_entry)]) for of_entry in sources]
        self._folders = [MediaFolder(entry.media_root) for entry in entries]

    @classmethod
    def open(cls, entries: Sequence[MixtureEntry], seed: int = 0) -> Dataset:
        """Open every file and choose rows; nothing is judged.

        Raises:
            ConfigError: an unknown suffix or strategy, or weights for some entries only.
            DataError: a file cannot be read.
        """
        if len({entry.weight is None for entry in entries}) > 1:
            without = next(entry.name for entry in entries if entry.weight is None)
            raise ConfigError(
                f"entry {without} has no weight, but others do", hint="set it for all entries or for none"
            )
        for entry in entries:
            select(0, entry.strategy, seed, entry.name)  # before a file of terabytes is opened
        sources = [[open_source(path, entry.ignored_keys, entry.mapping) for path in entry.paths] for entry in entries]
        rows = [
            select(sum(map(len, of_entry)), entry.strategy, seed, entry.name)
            for entry, of_entry in zip(entries, sources, strict=True)
        ]
        return cls(entries, sources, rows)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the entry, row counted over the files of that entry) of sample `index`.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        entry = int(np.searchsorted(self._starts, index, side="right")) - 1
        return entry, int(self._rows[entry][index - self._starts[entry]])

    def sample(self, index: int) -> AnnotatedSample:
        """Sample `index`, interpreted.

        Raises:
            BadSample: the row is malformed; the reason says how.
        """
        source, row = self._source(index)
        return replace(source.sample(row), sample_index=index)

    def open_media(self, index: int, ref: MediaRef) -> AnySource:
        """A media item of sample `index`: its path, an open file if it lies inside a container, or frames.

        Raises:
            BadSample: no such item, or a path that leaves the media root.
        """
        source, row = self._source(index)
        return source.open_media(row, ref, self.entries[self.locate(index)[0]].media_root)

    def media_file(self, index: int, ref: MediaRef) -> Path:
        """The file that holds a media item of sample `index`: its own, or the container it lies in.

        Raises:
            BadSample: a path that leaves the media root.
        """
        source, _ = self._source(index)
        return source.path if source.embeds(ref) else confine(self.entries[self.locate(index)[0]].media_root, ref.path)

    def embeds(self, index: int, ref: MediaRef) -> bool:
        """Whether the bytes of a media item of sample `index` lie in the file of its row."""
        return self._source(index)[0].embeds(ref)

    def home(self, index: int, ref: MediaRef) -> Path:
        """What the path of a media item of sample `index` is relative to: a media root, or the file of its row."""
        source, _ = self._source(index)
        return source.path if source.embeds(ref) else self.entries[self.locate(index)[0]].media_root

    def media_fingerprint(self, index: int, ref: MediaRef) -> str:
        """Size and time of change of a media file; empty for one inside a container, which `fingerprint` covers."""
        if self.embeds(index, ref):
            return ""
        try:
            source = self.open_media(index, ref)
            files = source.files if isinstance(source, FrameFiles) else (source,)
            found = [os.stat(file) for file in files if isinstance(file, Path)]
        except (BadSample, OSError):
            return "absent"
        return "\t".join(f"{status.st_size}\t{status.st_mtime_ns}" for status in found)

    def unplaced(self, index: int, sample: AnnotatedSample) -> tuple[str, str] | None:
        """Keys and name of a media file that exists and that sample `index` names without having it as a medium."""
        if not sample.named:
            return None
        source, _ = self._source(index)
        folder, members = self._folders[self.locate(index)[0]], source.members()
        inside = {os.path.basename(ref.path) for ref in sample.media if source.embeds(ref)}
        for keys, name in sample.named:
            path = folder.find(name, by_end=not sample.media)
            if (path is None and name not in members) or os.path.basename(name) in inside:
                continue
            if path not in {folder.path(placed) for ref in sample.media for placed in (ref.path, *ref.frames)}:
                return keys, name
        return None

    def fingerprint(self) -> str:
        """Hash of rows, what is in them and their weights: equal ones mean equal samples under equal numbers.

        Media files outside the data are not in it, see `media_fingerprint`.

        Raises:
            DataError: a file cannot be read.
        """
        (found,) = self.fingerprints(len(self))
        return found

    def fingerprints(self, num_samples: int) -> list[str]:
        """Fingerprints that this may have had when it ended after its first samples; none where that is unknown.

        Since then rows were appended to the last file, or files or entries added behind it.

        Raises:
            DataError: a file cannot be read.
        """
        digests, is_whole = [hashlib.sha256()], num_samples == len(self)
        for number, (entry, of_entry, rows) in enumerate(zip(self.entries, self._sources, self._rows, strict=True)):
            taken = min(len(rows), num_samples - int(self._starts[number]))
            if taken <= 0 and not is_whole:
                break
            is_cut = taken < len(rows)
            if is_cut and entry.strategy != "all":  # how many rows there are decides which it takes
                return []
            digests = _added(digests, f"{entry.weight}\n{sorted(entry.ignored_keys)}\n{entry.mapping or ''}")
            for source, first in zip(of_entry, self._source_starts[number].tolist(), strict=False):
                left = min(len(source), taken - first) if is_cut else len(source)
                if is_cut and left <= 0:
                    break
                found = {source.fingerprint()} if left == len(source) else source.fingerprints_before(left)
                digests = _added(digests, *(f"{left}\t{text}\n" for text in sorted(found)))
            for digest in digests:
                digest.update(np.ascontiguousarray(rows[:taken], "<i8").tobytes())
        return [digest.hexdigest() for digest in digests]

    def weights(self) -> npt.NDArray[np.float64]:
        """Expected number of times each sample comes up in as many draws as there are samples.

        All ones without weights. With them an entry's samples share the entry's part of the draws evenly: weight 2
        against weight 1 is two thirds of the draws, however many rows either has.

        Returns:
            Shape (len(self),); the sum is len(self).
        """
        shares = [entry.weight for entry in self.entries if entry.weight is not None]
        if not shares:
            return np.ones(len(self))
        counts = np.array([len(rows) for rows in self._rows])
        drawn = np.where(counts > 0, shares, 0.0)
        return np.repeat(drawn / np.maximum(counts, 1) * len(self) / (drawn.sum() or 1.0), counts)

    def _source(self, index: int) -> tuple[RowSource, int]:
        entry, row = self.locate(index)
        starts = self._source_starts[entry]
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return self._sources[entry][number], row - int(starts[number])


def _added(digests: list[hashlib._Hash], *texts: str) -> list[hashlib._Hash]:
    """Every digest followed by every text."""
    found = [(digest.copy(), text) for digest in digests for text in texts]
    for digest, text in found:
        digest.update(text.encode("utf-8", "backslashreplace"))
    return [digest for digest, _ in found]
