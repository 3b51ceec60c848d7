"""Stores of a size, and the things that are timed on them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from dflop.records import Correction, Measurement, MicrobatchSpan, StepObservation
from dflop.store import console, live, rollup, schema, snapshot
from dflop.store.ingest import ingest as run_ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolKey, encode, list_files

NUM_STEPS, NUM_RANKS = 1250, 8


def timed(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def fill_spool(root: Path, kind: str, num_files: int, rows_per_file: int) -> None:
    """Spool files as a run's processes would leave them; without fsync, which is the writers' time."""
    cls, make = {"correction": (Correction, _correction), "step_observation": (StepObservation, _observation)}[kind]
    table = schema.to_table(cls, [make(i) for i in range(rows_per_file)])
    for number in range(num_files):
        key = SpoolKey(kind, f"run{number % 20}", f"p{number % 8}", number // 8)
        path = root / "spool" / key.relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(key, table))


def ingest(root: Path) -> None:
    run_ingest(root)


def one_transaction_per_file(root: Path, kind: str, num_files: int) -> float:
    """Seconds to take files one by one: read, insert, commit."""
    files = [path for _, path in list_files(root)][:num_files]
    with duckdb.connect(str(root / "by-file.duckdb")) as con:
        con.register("_sample", schema.arrow_schema(kind).empty_table())
        con.execute("create table rows as select * from _sample")

        def take() -> None:
            for path in files:
                con.execute("insert into rows select * from read_parquet(?, hive_partitioning = false)", [str(path)])

        return timed(take)


def store_of_measurements(root: Path, num_rows: int) -> None:
    rows = [
        Measurement(
            "model", "llm", "gpu", "torch", "bf16", 1 + i % 8, 2, "random", 1 + i % 7, i, i * i, 1e-3 * i, 2e-3 * i,
            0.1, 0.1, 3, 1, i,
        )
        for i in range(num_rows)
    ]  # fmt: skip
    key = SpoolKey("measurement", "run", "p", 0)
    path = root / "spool" / key.relative_path
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(key, schema.to_table(Measurement, rows)))
    run_ingest(root)


COLUMNS = ("tp", "num_items", "num_tokens", "sum_sq_tokens", "forward_s", "backward_s")


def read_arrays(root: Path) -> None:
    with Reader(root) as reader:
        found = reader.arrays("measurement", COLUMNS, where={"profile_key": "model"})
    assert len(found["tp"]) == 100_000


def read_records(root: Path) -> None:
    with Reader(root) as reader:
        assert len(reader.records(Measurement, where={"profile_key": "model"})) == 100_000


def live_of_size(root: Path, num_bytes: float) -> int:
    with live.open_live(root) as con:
        while live.live_file(root).stat().st_size < num_bytes:
            con.execute(_sql("measurements"))
            con.execute("checkpoint")
        live.touch(con)
    return live.live_file(root).stat().st_size


def publish(root: Path) -> None:
    with live.open_live(root) as con:
        snapshot.publish_if_stale(con, root)


def file_copy(root: Path) -> None:
    shutil.copyfile(live.live_file(root), root / "copy")
    with open(root / "copy", "rb") as file:
        os.fsync(file.fileno())


def store_of_observations(root: Path, num_rows: int) -> None:
    """Runs of 1250 steps on 8 ranks with 4 microbatches, straight into the live database: a month of a team."""
    num_runs = num_rows // (NUM_STEPS * NUM_RANKS)
    with live.open_live(root) as con:
        con.execute(_sql("observations"), {"num_runs": num_runs, "num_steps": NUM_STEPS, "num_ranks": NUM_RANKS})
        con.execute(
            "insert into run_record by name select distinct run_id, 'job' as name, 'k' as config_key, 'done' as state, "
            "'gpu' as hardware, 'torch' as software, 'c' as code_rev, '/r' as run_dir, 1.79e9 as observed_at_s, "
            "run_id as _run_id, 'flow' as _producer, 0 as _seq from step_observation"
        )
        with live.transaction(con):
            rollup.refresh(con)
            live.touch(con)
        snapshot.publish_if_stale(con, root)


def steps_without_rollup(root: Path) -> None:
    console.query(
        root,
        "select run_id, count(distinct step), median(step_s) from (select run_id, step, max(step_s) as step_s "
        "from step_observation group by all) group by all",
    )


def named_queries(root: Path) -> list[tuple[str, float]]:
    """Every named query, from opening the snapshot to the last row; the median of five."""
    (run_id,) = console.query(root, "select run_id from run_rollup order by run_id limit 1")[1][0]
    values = {"run_id": run_id, "name": "job", "module": "llm", "profile_key": "x", "relation": "v_step", "step": 1}
    found = []
    for query in console.list_queries():
        params = {name: values[name] for name in query.parameter_names} or None
        # The lambda is called before the loop goes on.
        times_s = sorted(timed(lambda: console.query(root, query.sql, params)) for _ in range(5))  # noqa: B023, called at once
        found.append((query.name, times_s[2]))
    return found


def _sql(name: str) -> str:
    return (Path(__file__).parent / f"{name}.sql").read_text(encoding="utf-8")


def _correction(i: int) -> Correction:
    return Correction("run", i, "llm", f"table{i % 7}", 1.0 + i / 1000, 0.1, 8, 1000.0 + i)


def _observation(i: int) -> StepObservation:
    spans = tuple(MicrobatchSpan(m, 1, 50 + i, 2500, 0.1, 0.2, 0.0, 0.2, 0.3, 0.2, 0.2, 0.2) for m in range(4))
    return StepObservation(
        "run",
        0,
        i,
        "balanced",
        i % 8,
        "llm",
        0,
        i % 8,
        0.8,
        1.0,
        0.5,
        0.1,
        0.05,
        0.1,
        0.05,
        2.0,
        1.0,
        80,
        1000.0 + i,
        spans,
    )
