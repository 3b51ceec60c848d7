"""What correcting predictions is worth: `python -m tests.bench.correct --part NAME [--sizes TABLE] [--json FILE]`.

`synthetic`: known truths, simulated times; how much of what a misprediction costs is recovered, how soon, and what it
costs when there is none. Measured on this machine: `real` and `slow_rank`, jobs in which some sizes of items, or a
rank, are really slow; `replan`, a run whose mixture changes midway; `overhead`, what watching and correcting take.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

PARTS = ("synthetic", "real", "slow_rank", "replan", "overhead")
"""Each a file here with `main(sizes, seeds, json_path)`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS[:1])
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated ones without")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--json", type=Path, help="adds each part's figures to this file, under the part's name")
    args = parser.parse_args()
    for name in args.part:
        part = importlib.import_module(f"tests.bench.correct.{name}")
        part.main(args.sizes, tuple(range(args.seeds)), args.json)


if __name__ == "__main__":
    main()
