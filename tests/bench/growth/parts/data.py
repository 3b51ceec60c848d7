"""Data: profiles, tables of shapes, order, drift."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dflop.data.distribution import sample_batches, shapes_frame, summary
from dflop.data.drift import drift
from dflop.data.formats.json_rows import element_spans
from dflop.data.order import SampleOrder
from dflop.data.profile import profile_key, profile_shard
from dflop.jobs.rundir import RunDir
from dflop.models import load_family
from dflop.records import SampleShape
from tests.bench.data import cases
from tests.bench.growth.part import Part, Work
from tests.builders import random_batch

LINEAR = "one pass over samples"
FAMILY = "qwen2_5_omni_thinker"


def profile(size: int, folder: Path) -> Work:
    dataset, _ = cases.conversations(folder / "texts", size)
    return lambda: cases.profile(dataset)


def key_of(size: int, folder: Path) -> Work:
    dataset, _ = cases.conversations(folder / "texts", size)
    return lambda: profile_key(dataset, load_family(FAMILY, {}, {}))


def a_shard(size: int, folder: Path) -> Work:
    """One of as many shards as there are hundreds of samples: no shard should pay for the others."""
    dataset, _ = cases.conversations(folder / "texts", size)
    return lambda: profile_shard(dataset, load_family(FAMILY, {}, {}), 0, size // 100, key="bench")


def json_list(size: int, folder: Path) -> Work:
    path = folder / "rows.json"
    path.write_bytes(b"[" + b",".join(b'{"id": "%d", "conversations": []}' % i for i in range(size)) + b"]")
    return lambda: element_spans(path.read_bytes(), path)


def shapes(size: int) -> tuple[SampleShape, ...]:
    return random_batch(size, seed=1)


def write_shapes(size: int, folder: Path) -> Work:
    run, found = RunDir(folder), shapes(size)
    return lambda: run.write_shapes(found)


def read_shapes(size: int, folder: Path) -> Work:
    run = RunDir(folder)
    run.write_shapes(shapes(size))
    return run.shapes


def frame(size: int, _folder: Path) -> Work:
    found = shapes(size)
    return lambda: shapes_frame(found)


def distribution(size: int, _folder: Path) -> Work:
    found = _frame(size)
    return lambda: summary(found)


def drifted(size: int, _folder: Path) -> Work:
    before, after = _frame(size), _frame(size)
    return lambda: drift(before, after)


def order(size: int, _folder: Path) -> Work:
    def work() -> None:
        SampleOrder(0, size, 256).batch(0)

    return work


def batches(size: int, _folder: Path) -> Work:
    found = shapes(size)
    return lambda: sample_batches(found, 256, 16, seed=0)


def _frame(size: int) -> pl.DataFrame:
    few = shapes_frame(shapes(1000))
    return pl.concat([few] * (size // 1000))


PARTS = (
    Part("data profile by samples", (300, 3_000, 30_000), profile, 1.0, LINEAR),
    Part("key of a data profile by samples", (300, 3_000, 30_000), key_of, 1.0, LINEAR),
    Part("one shard of 100 samples by samples of the dataset", (300, 3_000, 30_000), a_shard, 1.0,
         "its rows are counted once: offsets of all lines"),
    Part("rows of a JSON list by rows", (3_000, 30_000, 300_000), json_list, 1.0, "one pass over bytes"),
    Part("shapes of a run written by samples", (300, 3_000, 30_000), write_shapes, 1.0, LINEAR),
    Part("shapes of a run read by samples", (300, 3_000, 30_000), read_shapes, 1.0, LINEAR),
    Part("table of shapes by samples", (300, 3_000, 30_000), frame, 1.0, LINEAR),
    Part("quantiles of a profile by samples", (10_000, 100_000, 1_000_000), distribution, 1.1, "sorts"),
    Part("drift between profiles by samples", (10_000, 100_000, 1_000_000), drifted, 1.1, "sorts"),
    Part("order of an epoch by samples", (10_000, 100_000, 1_000_000), order, 1.2,
         "one permutation: a million places at random are beyond the caches"),
    Part("batches for the planner by samples", (1_000, 10_000, 100_000), batches, 1.0, LINEAR),
)  # fmt: skip
