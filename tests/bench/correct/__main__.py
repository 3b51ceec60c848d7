"""What correcting predictions is worth: `python -m tests.bench.correct --part NAME [--sizes TABLE] [--json FILE]`.

`synthetic`: known truths, simulated times; how much of what a misprediction costs is recovered, how soon, and what it
costs when there is none. Measured on this machine: `real` and `slow_rank`, jobs in which some sizes of items, or a
rank, are really slow; `replan`, a run whose mixture changes midway; `overhead`, what watching and correcting take.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tests.bench.command import options
from tests.bench.figures import conclude

PARTS = ("synthetic", "real", "slow_rank", "replan", "overhead")
"""Each a file here with `main(sizes, seeds)`, which returns figures and bounds."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS[:1])
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated ones without")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    content: dict[str, Any] = {}
    bounds: list[tuple[str, bool]] = []
    for name in args.part:
        part = importlib.import_module(f"tests.bench.correct.{name}")
        content[name], of_part = part.main(args.sizes, tuple(range(args.seeds)))
        bounds += of_part
    conclude(content, bounds, args.json, "torch", "transformers", "duckdb", "numba")


if __name__ == "__main__":
    main()
