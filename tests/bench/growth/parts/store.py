"""The store: written and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from dflop.records import Measurement, RankSpan, SampleShape, StepObservation
from dflop.store import live, rollup, schema, snapshot
from dflop.store.console import query
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter
from tests.bench.growth.part import Part, Work
from tests.bench.store import cases
from tests.builders import random_batch

LINEAR = "a pass over rows"
FLAT = "roll-ups hold one row per run and step, and are looked up by run"
NUM_RANKS = 8


def observations(size: int) -> list[StepObservation]:
    return [cases._observation(i) for i in range(size)]


def spans(size: int) -> list[RankSpan]:
    return [RankSpan("run", 0, i // 8, i % 8, "llm", 0, 0, 0, "forward", i % 4, 0.1 * i, 0.1, 0) for i in range(size)]


def written(rows: Callable[[int], list[object]]) -> Callable[[int, Path], Work]:
    def prepare(size: int, folder: Path) -> Work:
        found = rows(size)

        def work() -> None:
            with SpoolWriter(folder, "run", "p") as writer:
                for row in found:
                    writer.append(row)

        return work

    return prepare


def many_files(size: int, folder: Path) -> Work:
    """A file per row: what the next one costs must not depend on those there are."""
    found = observations(8)

    def work() -> None:
        writer = SpoolWriter(folder, "run", "p", flush_rows=1)
        for i in range(size):
            writer.append(found[i % 8])

    return work


def to_table(size: int, _folder: Path) -> Work:
    found = observations(size)
    return lambda: schema.to_table(StepObservation, found)


def from_table(size: int, _folder: Path) -> Work:
    table = schema.to_table(StepObservation, observations(1000))
    many = pa.concat_tables([table] * (size // 1000))
    return lambda: schema.from_table(StepObservation, many)


def shape_rows(size: int, _folder: Path) -> Work:
    found = random_batch(size, seed=1)
    return lambda: schema.from_table(SampleShape, schema.to_table(SampleShape, found))


def read_arrays(size: int, folder: Path) -> Work:
    cases.store_of_measurements(folder, size)

    def work() -> None:
        with Reader(folder) as reader:
            reader.arrays("measurement", cases.COLUMNS, where={"profile_key": "model"})

    return work


def read_records(size: int, folder: Path) -> Work:
    cases.store_of_measurements(folder, size)

    def work() -> None:
        with Reader(folder) as reader:
            reader.records(Measurement, where={"profile_key": "model"})

    return work


def fill(folder: Path, num_runs: int, num_steps: int) -> None:
    """Runs straight into the live database, not rolled up."""
    with live.open_live(folder) as con:
        con.execute(cases._sql("observations"), {"num_runs": num_runs, "num_steps": num_steps, "num_ranks": NUM_RANKS})
        con.execute(
            "insert into run_record by name select distinct run_id, 'job' as name, 'k' as config_key, 'done' as state, "
            "'gpu' as hardware, 'torch' as software, 'c' as code_rev, '/r' as run_dir, 1.79e9 as observed_at_s, "
            "run_id as _run_id, 'flow' as _producer, 0 as _seq from step_observation"
        )
        rollup.mark(con, {run_id for (run_id,) in con.execute("select distinct run_id from run_record").fetchall()})
        live.touch(con)


def rolled_up(size: int, folder: Path) -> Work:
    fill(folder, 1, size)

    def work() -> None:
        with live.open_live(folder) as con, live.transaction(con):
            rollup.refresh(con)

    return work


def rolled_up_beside(size: int, folder: Path) -> Work:
    """One run of a hundred steps, in a store of so many runs."""
    fill(folder, size, 100)
    with live.open_live(folder) as con, live.transaction(con):
        rollup.refresh(con)

    def work() -> None:
        with live.open_live(folder) as con, live.transaction(con):
            (run_id,) = con.execute("select min(run_id) from run_record").fetchone() or ("",)
            rollup.mark(con, {run_id})
            rollup.refresh(con)

    return work


def published(size: int, folder: Path) -> Work:
    fill(folder, 1, size)

    def work() -> None:
        with live.open_live(folder) as con:
            live.touch(con)
            snapshot.publish_if_stale(con, folder)

    return work


def store_of(folder: Path, num_runs: int) -> str:
    """A published store of runs of a hundred steps; gives one run's id."""
    fill(folder, num_runs, 100)
    with live.open_live(folder) as con:
        with live.transaction(con):
            rollup.refresh(con)
            live.touch(con)
        snapshot.publish_if_stale(con, folder)
    return str(query(folder, "select min(run_id) from run_rollup")[1][0][0])


def named_queries(size: int, folder: Path) -> Work:
    store_of(folder, size)
    return lambda: cases.named_queries(folder)


def views_of_a_run(size: int, folder: Path) -> Work:
    run_id = store_of(folder, size)
    return lambda: [query(folder, f"select * from {view} where run_id = $1", [run_id]) for view in
                    ("v_step", "v_stage_idle", "v_run_summary", "v_straggler", "v_prediction_error")]  # fmt: skip


PARTS = (
    Part("spool of observations by rows", (300, 3_000, 30_000), written(observations), 1.0, LINEAR, 1.0, True),
    Part("spool of spans by rows", (300, 3_000, 30_000), written(spans), 1.0, LINEAR, 1.0, True),
    Part("spool by files", (30, 300, 3_000), many_files, 1.0, "a file is written without a look at the others", 1.0,
         True),
    Part("rows to columns by rows", (300, 3_000, 30_000), to_table, 1.0, LINEAR),
    Part("columns to rows by rows", (1_000, 10_000, 100_000), from_table, 1.0, LINEAR),
    Part("shapes to columns and back by rows", (300, 3_000, 30_000), shape_rows, 1.0, LINEAR),
    Part("reader's arrays by rows", (1_000, 10_000, 100_000), read_arrays, 1.0, LINEAR),
    Part("reader's records by rows", (1_000, 10_000, 100_000), read_records, 1.0, LINEAR),
    Part("roll-ups by steps of a run", (100, 1_000, 10_000), rolled_up, 1.0, LINEAR, 1.0, True),
    Part("roll-ups of one run by runs in the store", (1, 10, 100), rolled_up_beside, 1.0,
         "rows of other runs are passed over, block by block", 1.0, True),
    Part("publishing by steps in the store", (100, 1_000, 10_000), published, 1.0, "all of it is copied"),
    Part("named queries by runs in the store", (1, 10, 100), named_queries, 1.0, FLAT),
    Part("views of one run by runs in the store", (1, 10, 100), views_of_a_run, 1.0, FLAT),
)  # fmt: skip
