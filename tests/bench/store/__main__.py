"""What the store costs, on this machine: `python -m tests.bench.store [--json FILE] [--only NAME] [--rows N]`.

Every figure is set beside its bound and beside the obvious other way of doing the same thing, timed in the same run.
Rows are generated (their number is what matters); nothing is cached between figures but the operating system's pages.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.bench.command import options
from tests.bench.figures import Figure, finish, line
from tests.bench.store import cases


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", help="run the cases whose name contains this")
    parser.add_argument("--rows", type=int, default=10_000_000, help="observations in the store the queries run on")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dflop-bench-"))
    figures: list[Figure] = []
    try:
        for name, case in CASES.items():
            if not args.only or args.only in name:
                print(f"{name} ...", file=sys.stderr, flush=True)
                for found in case(folder / name, args.rows):
                    figures.append(found)
                    print(line(found), flush=True)
                shutil.rmtree(folder / name, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finish(figures, args.json, "duckdb", "pyarrow")


def ingest_case(
    kind: str, num_files: int, rows_per_file: int, bound_s: float | None
) -> Callable[[Path, int], list[Figure]]:
    def run(root: Path, _rows: int) -> list[Figure]:
        cases.fill_spool(root / "store", kind, num_files, rows_per_file)
        took_s = cases.timed(lambda: cases.ingest(root / "store"))
        rescan_s = cases.timed(lambda: cases.ingest(root / "store"))
        name = f"ingest {num_files * rows_per_file} {kind} in {num_files} files"
        few = min(num_files, 500)
        other_s = cases.one_transaction_per_file(root / "store", kind, few) * num_files / few
        other = f"a transaction per file{' (extrapolated from 500)' if few < num_files else ''}"
        return [
            Figure(name, took_s, bound_s, other, other_s),
            Figure(f"  nothing new in {num_files} files", rescan_s, 2.0, "", None),
        ]

    return run


def read_case(root: Path, _rows: int) -> list[Figure]:
    cases.store_of_measurements(root, 100_000)
    best_s = min(cases.timed(lambda: cases.read_arrays(root)) for _ in range(7))
    first_s = cases.timed(lambda: cases.read_arrays(root))
    objects_s = cases.timed(lambda: cases.read_records(root))
    return [
        Figure(
            "100,000 cost rows to numpy, open included",
            float(np.median([best_s, first_s])),
            0.060,
            "as records",
            objects_s,
        )
    ]


def publish_case(root: Path, _rows: int) -> list[Figure]:
    num_bytes = cases.live_of_size(root, 80e6)
    took_s = cases.timed(lambda: cases.publish(root))
    copy_s = cases.timed(lambda: cases.file_copy(root))
    return [
        Figure(f"publish a store of {num_bytes / 1e6:.0f} MB", took_s, 4.0, "cp, fsync (not safe while open)", copy_s)
    ]


def query_case(root: Path, rows: int) -> list[Figure]:
    cases.store_of_observations(root, rows)
    direct_s = cases.timed(lambda: cases.steps_without_rollup(root))
    figures = [
        Figure(f"dflop sql {name} on {rows / 1e6:g} M", seconds, 0.200, "", None)
        for name, seconds in cases.named_queries(root)
    ]
    runs = next(f for f in figures if f.name.startswith("dflop sql runs "))
    figures.remove(runs)
    return [Figure(runs.name, runs.seconds, runs.bound_s, "steps straight from observations", direct_s), *figures]


CASES: dict[str, Callable[[Path, int], list[Figure]]] = {
    "ingest-many": ingest_case("correction", 10_000, 50, 15.0),
    "ingest-many-nested": ingest_case("step_observation", 10_000, 50, None),
    "ingest-few": ingest_case("correction", 10, 50_000, 1.5),
    "ingest-few-nested": ingest_case("step_observation", 10, 50_000, None),
    "read": read_case,
    "publish": publish_case,
    "queries": query_case,
}

if __name__ == "__main__":
    main()
