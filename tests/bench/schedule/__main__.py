"""What scheduling is worth and costs, part by part: `python -m tests.bench.schedule [--part NAME ...] [--sizes TABLE]`.

Each part prints its figures as it goes and leaves them as JSON. `bottleneck`, `makespan` and `idle` are simulated, on
costs of a data sheet; `real` and `trainer` are measured on this machine's cores, `overhead` in a job of its own.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

PARTS = ("bottleneck", "makespan", "idle", "real", "trainer", "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated mixtures without")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.part:
        part = importlib.import_module(f"tests.bench.schedule.{name}")
        part.main(args.sizes, tuple(range(args.seeds)), args.out)


if __name__ == "__main__":
    main()
