"""What scheduling is worth and costs, part by part: `python -m tests.bench.schedule --part NAME [--sizes TABLE]`.

A part prints its figures as it goes. `bottleneck`, `makespan` and `idle` are simulated, on
costs of a data sheet; `real` and `trainer` are measured on this machine's cores, `overhead` in a job of its own.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.bench.command import options

PARTS = ("bottleneck", "makespan", "idle", "real", "trainer", "overhead")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=PARTS, default=PARTS[0])
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated mixtures without")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    part = importlib.import_module(f"tests.bench.schedule.{args.part}")
    part.main(args.sizes, tuple(range(args.seeds)), args.json)


if __name__ == "__main__":
    main()
