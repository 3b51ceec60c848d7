"""Profile a dataset in shards that need no coordination, under a key that says exactly what was profiled.

Shards are contiguous ranges of rows, so their results laid end to end are the profile, whatever the number of shards,
and of processes within a shard. The key covers content (annotations, tokenizer, template, family rules, limits) and,
for media, path, size and mtime: hashing a terabyte of video to notice an edit is not worth the hours, `touch` causing
one re-profile is.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dflop.data.annotations import AnnotatedSample, BadSample, printable
from dflop.data.chat import ChatTemplate
from dflop.data.content import content_hash
from dflop.data.header_cache import HeaderCache, HeaderRow
from dflop.data.mixture import Dataset, MixtureEntry
from dflop.data.row_keys import never_ignored
from dflop.data.shapes import ShapeRules, shapes_of
from dflop.data.size_table import is_table_of_sizes, profile_sizes, read_sizes
from dflop.data.tokens import ChatTokenizer
from dflop.errors import DataError
from dflop.models.media import MediaRules
from dflop.progress import At, counted, quiet_imports, unseen
from dflop.records import QuarantinedSample, SampleShape

RULES_VERSION = 16
"""Raise when this room reads the same row differently: old profiles then no longer match."""

BLOCK_ROWS = 256
"""Rows a worker takes at a time: enough to keep the tokenizer's batches full."""
_MAX_KEYS_SHOWN = 20

Result = SampleShape | QuarantinedSample
_Noted = Counter[tuple[str, str]]
"""Rows by what was noted of them, and of which key or token."""
_Done = tuple[list[Result], list[HeaderRow], _Noted]
_REFUSED = "rows skipped for a key"
_UNKNOWN = "unknown keys, ignored"
_NAMED = "special tokens that texts name, encoded as characters (dataset.special_tokens)"


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """Where a dataset lies, and how its samples are read."""

    entries: tuple[MixtureEntry, ...]
    tokenizer: Path
    max_llm_tokens: int
    chat_template: str = "chatml"
    """Name or file, see `ChatTemplate.load`."""
    overlong: tuple[str, ...] = ()
    """What to do with samples of more tokens than that, see `shapes.py`."""
    min_side_px: int = 2
    """Pictures with a shorter side are quarantined."""
    seed: int = 0
    """Which rows entries with a random strategy take."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer that texts may name."""

    @classmethod
    def of_file(cls, path: Path, media_root: Path, tokenizer: Path, max_llm_tokens: int) -> DatasetRef:
        """All rows of one file."""
        return cls((MixtureEntry(path.name, (path,), media_root),), tokenizer, max_llm_tokens)

    def open(self) -> Dataset:
        """The rows.

        Raises:
            ConfigError: an unknown suffix or strategy.
            DataError: a file or folder cannot be read.
        """
        for entry in self.entries:
            if not entry.media_root.is_dir():
                raise DataError("media root is not a folder", where=str(entry.media_root))
        return Dataset.open(self.entries, self.seed)

    def chat_tokenizer(self, media: MediaRules) -> ChatTokenizer:
        """What turns its texts into tokens.

        Raises:
            ConfigError: tokenizer or chat template do not fit the family.
        """
        return ChatTokenizer(self.tokenizer, media, self.chat_template, self.special_tokens)

    def shape_rules(self, key: str, media: MediaRules, tokenizer: ChatTokenizer) -> ShapeRules:
        """What decides the shapes of its rows."""
        return ShapeRules(key, media, tokenizer, self.max_llm_tokens, self.overlong, self.min_side_px)

    @property
    def sizes(self) -> Path | None:
        """The table of sizes this is, if it is one: shapes without texts and media, see `size_table.py`."""
        (path, *more) = self.entries[0].paths
        alone = len(self.entries) == 1 and not more and self.entries[0].strategy == "all"
        return path if alone and is_table_of_sizes(path) else None


def profile_shard(
    dataset: DatasetRef,
    media: MediaRules,
    shard_index: int,
    num_shards: int,
    progress: Callable[[str], None] | None = None,
    *,
    at: At = unseen,
    key: str = "",
    num_workers: int = 1,
    cache: Path | None = None,
    first_row: int = 0,
) -> tuple[list[SampleShape], list[QuarantinedSample]]:
    """Shapes and quarantine rows of one contiguous shard, both in order of `sample_index`.

    Every row of the shard is in exactly one of the two lists.

    Args:
        dataset: What to profile.
        media: The family's rules, which turn sizes into tokens.
        shard_index: 0 .. num_shards - 1.
        num_shards: Into how many shards the rows are cut; some may be empty.
        progress: Receives lines on what was found.
        at: Receives how many rows are done.
        key: `profile_key(dataset, media)` where the caller has it already; it reads every row.
        num_workers: Processes to spread the shard over; 1: this one.
        cache: Folder with headers that were read before, see `HeaderCache`.
        first_row: Where the first shard begins; rows before are known.

    Raises:
        DataError: a file or folder cannot be read.
        ConfigError: tokenizer or chat template do not fit the family.
        ValueError: there is no such shard.
    """
    if not 0 <= shard_index < num_shards:
        raise ValueError(f"shard_index {shard_index} is not in 0..{num_shards - 1}")
    key = key or profile_key(dataset, media)
    if dataset.sizes is not None:
        table = read_sizes(dataset.sizes)
        rows = shard_rows(len(table), shard_index, num_shards, first_row)
        rules = dataset.shape_rules(key, media, dataset.chat_tokenizer(media))
        return _sorted(profile_sizes(table[rows.start : rows.stop], rules, rows.start))
    work = _Work(dataset, media, key, cache)
    rows = shard_rows(len(work.rows), shard_index, num_shards, first_row)
    tell = progress or (lambda _: None)
    label = f"data profile, shard {shard_index + 1} of {num_shards}"
    results: list[Result] = []
    headers: list[HeaderRow] = []
    noted: _Noted = Counter()
    num_bad = 0
    what = f"{label}, rows"
    at(what, 0, len(rows))
    for found, new, of_block in _run(work, rows, num_workers):
        results += found
        headers += new
        noted += of_block
        num_bad += sum(isinstance(r, QuarantinedSample) for r in found)
        at(what, len(results), len(rows))
    work.headers.save(headers)
    tell(f"{label}: {len(rows)} rows, {num_bad} skipped, {len(headers)} media files read")
    for what in (_REFUSED, _UNKNOWN, _NAMED):
        counts = Counter({name: n for (noted_as, name), n in noted.items() if noted_as == what})
        if counts:
            tell(f"{label}: {what}: {', '.join(f'{k} ({n} rows)' for k, n in counts.most_common(_MAX_KEYS_SHOWN))}")
    return _sorted(results)


def _sorted(results: list[Result]) -> tuple[list[SampleShape], list[QuarantinedSample]]:
    return [r for r in results if isinstance(r, SampleShape)], [r for r in results if isinstance(r, QuarantinedSample)]


def shard_rows(num_rows: int, shard_index: int, num_shards: int, first_row: int = 0) -> range:
    """Rows of one shard: contiguous, and no two shards differ by more than one row."""
    first, end = ((num_rows - first_row) * shard // num_shards for shard in (shard_index, shard_index + 1))
    return range(first_row + first, first_row + end)


@dataclass(frozen=True, slots=True)
class DatasetKeys:
    """What identifies a dataset."""

    profile: str
    """Identity of its profile, as 16 hex digits; equal keys mean equal shapes."""
    rows: str
    """Identity of its texts and rows, its media files left out; part of what `profile` covers."""
    base: str = ""
    """Key of a known profile that its first rows alone would have; empty: there is none."""
    num_base_rows: int = 0
    num_rows: int = 0
    """All rows; 0 for a table of sizes."""


def profile_key(dataset: DatasetRef, media: MediaRules) -> str:
    """Identity of a data profile; raises as `dataset_keys`."""
    return dataset_keys(dataset, media).profile


def dataset_keys(
    dataset: DatasetRef, media: MediaRules, known: Mapping[str, int] | None = None, at: At = unseen
) -> DatasetKeys:
    """What identifies a dataset, and the largest part of it that was profiled before; reads every row once.

    Args:
        dataset: What is to be profiled.
        media: The family's rules.
        known: Number of rows of profiles by key, of any datasets.
        at: Receives how many rows are read.

    Raises:
        DataError: a file cannot be read.
        ConfigError: the chat template cannot be read.
    """
    rules = hashlib.sha256(f"data-profile {RULES_VERSION}\n{' '.join(dataset.special_tokens)}\n".encode())
    template, tokenizer = ChatTemplate.load(dataset.chat_template).source, _file_hash(dataset.tokenizer)
    limits = f"{dataset.max_llm_tokens}\n{','.join(dataset.overlong)}\n{dataset.min_side_px}"
    rules.update(f"{tokenizer}\n{media.rules_key}\n{template}\n{limits}\n".encode())

    def keys(fingerprint: str, profile: hashlib._Hash) -> DatasetKeys:
        rows = hashlib.sha256(f"{tokenizer}\n{template}\n{fingerprint}".encode())
        return DatasetKeys(profile.hexdigest()[:16], rows.hexdigest()[:16])

    if dataset.sizes is not None:
        rules.update((fingerprint := _file_hash(dataset.sizes)).encode())
        return keys(fingerprint, rules)
    rows, lines = dataset.open(), set[str]()

    def profile(fingerprint: str) -> hashlib._Hash:
        """The profile's key over the rows whose media are in `lines`."""
        digest = rules.copy()
        digest.update(f"{fingerprint}\n".encode())
        for line in sorted(lines):
            digest.update(line.encode("utf-8", "backslashreplace"))
        return digest

    base, lengths = ("", 0), set((known or {}).values())
    for index in counted(range(len(rows)), "reading rows of the dataset", at):
        if index and index in lengths:
            found = {profile(fingerprint).hexdigest()[:16] for fingerprint in rows.fingerprints(index)}
            base = next(((key, index) for key in found if (known or {}).get(key) == index), base)
        with contextlib.suppress(BadSample):  # the fingerprint of the rows covers those without readable media
            sample = rows.sample(index)
            lines.update(f"{ref.path}\t{rows.media_fingerprint(index, ref)}\n" for ref in sample.media)
            lines.update(filter(None, ["\t".join(rows.unplaced(index, sample) or ())]))
    fingerprint = rows.fingerprint()
    found_keys = keys(fingerprint, profile(fingerprint))
    return replace(found_keys, base=base[0], num_base_rows=base[1], num_rows=len(rows))


class _Work:
    """What a process needs to turn rows into shapes."""

    def __init__(self, dataset: DatasetRef, media: MediaRules, key: str, cache: Path | None) -> None:
        self.given = (dataset, media, key, cache)
        self.rows = dataset.open()
        self.headers = HeaderCache(self.rows, cache)
        self._weights = self.rows.weights()
        self._tokenizer = dataset.chat_tokenizer(media)
        self._rules = dataset.shape_rules(key, media, self._tokenizer)

    def do(self, rows: range) -> _Done:
        """Results of some rows, in order, the headers read for them, and what was noted."""
        samples = [(i, self._sample(i)) for i in rows]
        found = shapes_of(samples, self._rules, self.headers.read)
        noted: _Noted = Counter()
        for _, sample in samples:
            if isinstance(sample, BadSample):
                noted.update([(_REFUSED, sample.key)] if sample.key else [])
            else:
                noted.update((_UNKNOWN, key) for key in sample.unknown_keys)
                noted.update((_NAMED, token) for token in self._tokenizer.spelled_out(sample))
        done = [self._finished(r, sample) for r, (_, sample) in zip(found, samples, strict=True)]
        return done, self.headers.take_new(), noted

    def _finished(self, result: Result, sample: AnnotatedSample | BadSample) -> Result:
        """With what the dataset knows and the row alone does not."""
        if isinstance(sample, BadSample) or not isinstance(result, SampleShape):
            return result
        weight = float(self._weights[result.sample_index])
        return replace(result, weight=weight, content_hash=content_hash(self.rows, sample, result.items))

    def _sample(self, index: int) -> AnnotatedSample | BadSample:
        try:
            sample = self.rows.sample(index)
        except BadSample as error:
            return error
        if (unplaced := self.rows.unplaced(index, sample)) is None:
            return sample
        keys, name = unplaced
        key = keys.rpartition(".")[2]
        hint = "remove the name" if never_ignored([key]) else "to ignore the key, add it to dataset.ignored_keys"
        reason = f"row names {printable(name)} under `{printable(keys)}`: the file exists, but is not placed; {hint}"
        return BadSample(reason, path=printable(name), sample_id=sample.sample_id, key=printable(key))


def _run(work: _Work, rows: range, num_workers: int) -> Iterator[_Done]:
    blocks = [rows[at : at + BLOCK_ROWS] for at in range(0, len(rows), BLOCK_ROWS)]
    if num_workers <= 1 or len(blocks) <= 1:
        yield from map(work.do, blocks)
        return
    # Spawned: a forked tokenizer may hang on threads that were not forked with it.
    with ProcessPoolExecutor(
        min(num_workers, len(blocks)), multiprocessing.get_context("spawn"), _begin, work.given
    ) as pool:
        yield from pool.map(_do, blocks)


_process: list[_Work] = []
"""The one `_Work` of a worker process, made when it starts."""


def _begin(dataset: DatasetRef, media: MediaRules, key: str, cache: Path | None) -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # the pool is the parallelism
    quiet_imports()
    _process.append(_Work(dataset, media, key, cache))


def _do(rows: range) -> _Done:
    return _process[0].do(rows)


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"file cannot be read: {error.strerror}", where=str(path)) from error
