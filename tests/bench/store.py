"""What the store costs, on this machine: `python -m tests.bench.store [--json FILE] [--rows N]`.

Every figure stands with its bound. Rows are generated (their number is what matters); nothing is cached between figures
but the operating system's pages.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from dflop.records import Correction, Measurement
from dflop.store import console, live, rollup, schema, snapshot
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolKey, encode
from tests.bench.command import options
from tests.bench.figures import Figure, finish

NUM_STEPS, NUM_RANKS, NUM_MEASUREMENTS = 1250, 8, 100_000
COLUMNS = ("tp", "num_items", "num_tokens", "sum_sq_tokens", "forward_s", "backward_s")
INGESTS = ((10_000, 50, 15.0), (10, 50_000, 1.5))
"""Files, rows of a file, bound in seconds."""
PUBLISHED_BYTES = 80e6


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="observations in the store the queries run on")
    args = parser.parse_args()
    finish(all_figures(args.rows), args.json, "duckdb", "pyarrow")


def all_figures(num_rows: int) -> Iterator[Figure]:
    cases = (
        *(lambda root, of=of: ingest_figures(root, *of) for of in INGESTS),
        read_figures, publish_figures, lambda root: query_figures(root, num_rows),
    )  # fmt: skip
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
            yield from case(Path(folder))


def ingest_figures(root: Path, num_files: int, rows_per_file: int, bound_s: float) -> Iterator[Figure]:
    fill_spool(root / "store", num_files, rows_per_file)
    took_s = timed(lambda: ingest(root / "store"))
    rescan_s = timed(lambda: ingest(root / "store"))
    yield Figure(f"ingest {num_files * rows_per_file} correction in {num_files} files", took_s, bound_s)
    yield Figure(f"  nothing new in {num_files} files", rescan_s, 2.0)


def read_figures(root: Path) -> Iterator[Figure]:
    write_measurements(root)
    took_s = min(timed(lambda: read_arrays(root)) for _ in range(8))
    yield Figure("100,000 cost rows to numpy, open included", took_s, 0.060)


def publish_figures(root: Path) -> Iterator[Figure]:
    write_measurements(root)
    with live.open_live(root) as (con, _):
        while live.live_file(root).stat().st_size < PUBLISHED_BYTES:
            con.execute(
                "insert into measurement by name select * replace ((random() * 1e6)::bigint as num_tokens, "
                "(random() * 1e12)::bigint as sum_sq_tokens, random() as forward_s, random() as backward_s, "
                "random() as forward_spread_s, random() as backward_spread_s) from measurement limit 200000"
            )
            con.execute("checkpoint")
        live.touch(con)
    num_bytes = live.live_file(root).stat().st_size

    def publish() -> None:
        with live.open_live(root) as (con, lease):
            snapshot.publish_if_stale(con, root, lease, live.silent)

    yield Figure(f"publish a store of {num_bytes / 1e6:.0f} MB", timed(publish), 4.0)


def query_figures(root: Path, num_rows: int) -> Iterator[Figure]:
    """Every named query, from opening the snapshot to the last row; the median of five."""
    store_of_observations(root, num_rows)
    (run_id,) = console.query(root, "select run_id from run_rollup order by run_id limit 1")[1][0]
    values = {"run_id": run_id, "name": "job", "module": "llm", "profile_key": "x", "relation": "v_step", "step": 1,
              "usd_per_gpu_hour": 2.0}  # fmt: skip
    for query in console.list_queries():
        params = {name: values[name] for name in query.parameter_names} or None
        seconds = sorted(timed(lambda q=query, p=params: console.query(root, q.sql, p)) for _ in range(5))[2]
        yield Figure(f"dflop sql {query.name} on {num_rows / 1e6:g} M", seconds, 0.200)


def timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def fill_spool(root: Path, num_files: int, rows_per_file: int) -> None:
    """Spool files as a run's processes would leave them; without fsync, which is the writers' time."""
    rows = [
        Correction("run", i, "llm", f"table{i % 7}", 1.0 + i / 1000, 0.1, 8, 1000.0 + i) for i in range(rows_per_file)
    ]
    table = schema.to_table(Correction, rows)
    for number in range(num_files):
        write(root, SpoolKey("correction", f"run{number % 20}", f"p{number % 8}", number // 8), table)


def write_measurements(root: Path) -> None:
    rows = [
        Measurement(
            "model", "llm", "gpu", "torch", "bf16", 1 + i % 8, 2, "random", 1 + i % 7, i, i * i, 1e-3 * i, 2e-3 * i,
            0.1, 0.1, 3, 1, i,
        )
        for i in range(NUM_MEASUREMENTS)
    ]  # fmt: skip
    write(root, SpoolKey("measurement", "run", "p", 0), schema.to_table(Measurement, rows))
    ingest(root)


def write(root: Path, key: SpoolKey, table: pa.Table) -> None:
    path = root / "spool" / key.relative_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(key, table))


def read_arrays(root: Path) -> None:
    with Reader(root) as reader:
        found = reader.arrays("measurement", COLUMNS, where={"profile_key": "model"})
    assert len(found["tp"]) == NUM_MEASUREMENTS


def store_of_observations(root: Path, num_rows: int) -> None:
    """Runs of 1250 steps on 8 ranks with 4 microbatches, straight into the live database: a month of a team."""
    with live.open_live(root) as (con, lease):
        add_runs(con, num_rows // (NUM_STEPS * NUM_RANKS))
        con.execute(
            "insert into run_record by name select distinct run_id, 'job' as name, 'k' as config_key, 'done' as state, "
            "'gpu' as hardware, 'torch' as software, 'c' as code_rev, '/r' as run_dir, 1.79e9 as observed_at_s, "
            "run_id as _run_id, 'flow' as _producer, 0 as _seq from step_observation"
        )
        with live.transaction(con):
            rollup.refresh(con)
            live.touch(con)
        snapshot.publish_if_stale(con, root, lease, live.silent)


def add_runs(con: duckdb.DuckDBPyConnection, num_runs: int) -> None:
    sql = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    con.execute(sql, {"num_runs": num_runs, "num_steps": NUM_STEPS, "num_ranks": NUM_RANKS})


if __name__ == "__main__":
    main()
