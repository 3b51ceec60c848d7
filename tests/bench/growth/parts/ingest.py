"""The store: ingested, compacted, made again, compared."""

from __future__ import annotations

from pathlib import Path

from dflop.store.compact import compact
from dflop.store.ingest import ingest
from dflop.store.rebuild import rebuild
from dflop.store.verify import verify
from tests.bench.growth.part import Part, Work
from tests.bench.store import cases

BY_FILES = "each file is read and checked once"


def by_rows(size: int, folder: Path) -> Work:
    cases.fill_spool(folder, "step_observation", 10, size // 10)
    return lambda: ingest(folder)


def by_files(size: int, folder: Path) -> Work:
    cases.fill_spool(folder, "correction", size, 10)
    return lambda: ingest(folder)


def nothing_new(size: int, folder: Path) -> Work:
    cases.fill_spool(folder, "correction", size, 2)
    ingest(folder)
    return lambda: ingest(folder)


def one_file_more(size: int, folder: Path) -> Work:
    """A pass that has one file to take, in a store of so many."""
    cases.fill_spool(folder, "correction", size, 2)
    ingest(folder)
    cases.fill_spool(folder, "step_observation", 1, 2)
    return lambda: ingest(folder)


def compacted(size: int, folder: Path) -> Work:
    cases.fill_spool(folder, "correction", size, 2)
    ingest(folder)
    return lambda: compact(folder, min_files=2, min_age_s=0.0)


def rebuilt(size: int, folder: Path) -> Work:
    cases.fill_spool(folder, "correction", size, 2)
    ingest(folder)
    return lambda: rebuild(folder)


def verified(size: int, folder: Path) -> Work:
    cases.fill_spool(folder, "correction", size, 2)
    ingest(folder)
    return lambda: verify(folder)


PARTS = (
    Part("ingest by rows", (300, 3_000, 30_000), by_rows, 1.0, BY_FILES, 1.0, True),
    Part("ingest by files", (100, 1_000, 10_000), by_files, 1.0, BY_FILES, 1.0, True),
    Part("ingest of nothing new by files", (100, 1_000, 10_000), nothing_new, 1.0, "the spool is listed"),
    Part("ingest of one file by files there", (100, 1_000, 10_000), one_file_more, 1.0, "a look at each", 1.0, True),
    Part("compaction by files", (100, 1_000, 10_000), compacted, 1.0, BY_FILES, 1.0, True),
    Part("rebuild by files", (100, 1_000, 10_000), rebuilt, 1.0, BY_FILES),
    Part("verification by files", (100, 1_000, 10_000), verified, 1.0, BY_FILES),
)  # fmt: skip
