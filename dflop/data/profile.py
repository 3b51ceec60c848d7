"""Profile a dataset in shards that need no coordination, under a key that says exactly what was profiled.

Shards are contiguous ranges of rows, so their results laid end to end are the profile, whatever the number of shards.
The key covers content (annotations, tokenizer, family rules, token limit) and, for media, path, size and mtime:
hashing a terabyte of video to notice an edit is not worth the hours, `touch` causing one re-profile is.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflop.data.annotations import BadSample, confine
from dflop.data.formats.annotation_file import AnnotationFile
from dflop.data.shapes import ShapeRules, shape_of_row
from dflop.data.tokens import ChatTokenizer
from dflop.errors import DataError
from dflop.models.family import Family
from dflop.records import QuarantinedSample, SampleShape

RULES_VERSION = 1
"""Raise when this room reads the same row differently: old profiles then no longer match."""

_REPORT_EVERY = 2000


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """Where a dataset lies, and the longest sample to take from it."""

    annotations: Path
    media_root: Path
    tokenizer: Path
    max_llm_tokens: int


def profile_shard(
    dataset: DatasetRef,
    family: Family,
    shard_index: int,
    num_shards: int,
    progress: Callable[[str], None] | None = None,
    *,
    key: str = "",
) -> tuple[list[SampleShape], list[QuarantinedSample]]:
    """Shapes and quarantine rows of one contiguous shard, both in order of `sample_index`.

    Every row of the shard is in exactly one of the two lists. Ids that occur twice within the shard are reported
    and kept: the row number, not the id, identifies a sample.

    Args:
        dataset: What to profile.
        family: Whose rules turn sizes into tokens.
        shard_index: 0 .. num_shards - 1.
        num_shards: Into how many shards the rows are cut; some may be empty.
        progress: Told how far the shard is.
        key: `profile_key(dataset, family)` where the caller has it already; it reads every row.

    Raises:
        DataError: annotations or media root cannot be read.
        ConfigError: the tokenizer does not fit the family.
    """
    if not 0 <= shard_index < num_shards:
        raise ValueError(f"shard_index {shard_index} is not in 0..{num_shards - 1}")
    if not dataset.media_root.is_dir():
        raise DataError("media root is not a folder", where=str(dataset.media_root))
    annotations = AnnotationFile.open(dataset.annotations)
    tokenizer = ChatTokenizer(dataset.tokenizer, family)
    key = key or profile_key(dataset, family)
    rules = ShapeRules(key, family, tokenizer, dataset.media_root, dataset.max_llm_tokens)
    shapes: list[SampleShape] = []
    quarantined: list[QuarantinedSample] = []
    rows = shard_rows(len(annotations), shard_index, num_shards)
    tell = progress or (lambda _: None)
    label = f"data profile, shard {shard_index + 1} of {num_shards}"
    for done, index in enumerate(rows):
        if done and done % _REPORT_EVERY == 0:
            tell(f"{label}: {done} of {len(rows)} rows, {len(quarantined)} quarantined")
        result = shape_of_row(annotations, index, rules)
        if isinstance(result, SampleShape):
            shapes.append(result)
        else:
            quarantined.append(result)
    tell(f"{label}: {len(rows)} rows, {len(quarantined)} quarantined")
    _report_duplicates([s.sample_id for s in shapes] + [q.sample_id for q in quarantined if q.sample_id], tell)
    return shapes, quarantined


def shard_rows(num_rows: int, shard_index: int, num_shards: int) -> range:
    """Rows of one shard: contiguous, and no two shards differ by more than one row."""
    return range(num_rows * shard_index // num_shards, num_rows * (shard_index + 1) // num_shards)


def profile_key(dataset: DatasetRef, family: Family) -> str:
    """Identity of a data profile, as 16 hex digits; equal keys mean equal shapes.

    Raises:
        DataError: annotations or tokenizer cannot be read.
    """
    digest = hashlib.sha256(f"data-profile {RULES_VERSION}\n".encode())
    for part in (_file_hash(dataset.annotations), _file_hash(dataset.tokenizer), family.rules_key):
        digest.update(f"{part}\n".encode())
    digest.update(f"{dataset.max_llm_tokens}\n".encode())
    for path in sorted(set(_media_paths(AnnotationFile.open(dataset.annotations)))):
        digest.update(f"{path}\t{_fingerprint(dataset.media_root, path)}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]


def _media_paths(annotations: AnnotationFile) -> Iterator[str]:
    for index in range(len(annotations)):
        try:
            sample = annotations.sample(index)
        except BadSample:
            continue  # the annotation file's own hash covers rows without readable media
        yield from (ref.path for ref in sample.media)


def _fingerprint(media_root: Path, relative: str) -> str:
    try:
        status = os.stat(confine(media_root, relative))
    except (BadSample, OSError):
        return "absent"
    return f"{status.st_size}\t{status.st_mtime_ns}"


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"file cannot be read: {error.strerror}", where=str(path)) from error


def _report_duplicates(sample_ids: list[str], tell: Callable[[str], None]) -> None:
    duplicates = sorted(i for i, count in Counter(sample_ids).items() if count > 1)
    if duplicates:
        more = f" and {len(duplicates) - 3} more" if len(duplicates) > 3 else ""
        tell(f"{len(duplicates)} sample ids occur more than once (all rows kept): {', '.join(duplicates[:3])}{more}")
