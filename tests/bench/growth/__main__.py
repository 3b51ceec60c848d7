"""How time and memory of every part grow: `python -m tests.bench.growth [--full] [--part TEXT ...] [--plot FILE.svg]`.

Each part is measured at a size and at ten times it, in a full run at a hundred times it, too: processor seconds, best
of some repeats, and the peak of resident memory, in a new process per size after one run of the smallest. An exponent
is that of the step between the two largest sizes. Beside it stands the one that the part ought to have, and why; what
exceeds it by more than 0.1 is above its bound. Parts are in the order of that excess, the worst first. Exponents say
how a part grows, not that it is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.figures import json_text, machine
from tests.bench.growth.measure import MeasureError, in_a_process
from tests.bench.growth.part import Growth, Part, Point

LIMIT_S = 60.0
"""Of one size, after the smallest one has been run, what prepares it included; a full run allows ten times as much."""
LIBRARIES = ("numpy", "numba", "duckdb", "pyarrow", "polars", "torch")
THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--part", nargs="+", default=[""], help="parts whose names contain one of these")
    parser.add_argument("--full", action="store_true", help="a hundred times the smallest size, too")
    parser.add_argument("--plot", type=Path, help="draw all of them there (.svg, .png, .pdf)")
    parser.add_argument("--sizes", type=Path, help="not needed: sizes are generated")
    parser.add_argument("--media", type=Path, help="not needed: nothing is decoded")
    args = parser.parse_args()
    os.environ |= dict.fromkeys(THREADS, "1")  # before the server of processes starts
    from tests.bench.growth.parts import PARTS

    chosen = [part for part in PARTS if any(text in part.name for text in args.part)]
    if not chosen:
        sys.exit("no part is called so; there are:\n" + "\n".join(part.name for part in PARTS))
    begin_s = time.perf_counter()
    found = []
    for number, part in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {part.name} ...", file=sys.stderr, flush=True)
        found.append(grown(part, part.sizes if args.full else part.sizes[:2], LIMIT_S * (10 if args.full else 1)))
        print(lines(found[-1:])[1], file=sys.stderr, flush=True)
    found.sort(key=lambda growth: -growth.excess)
    print("\n".join(lines(found)))
    print(f"{time.perf_counter() - begin_s:.0f} s", file=sys.stderr)
    content = content_of(found, is_full=args.full)
    if args.json:
        args.json.write_text(json_text(content))
    if args.plot:
        from tests.bench.growth.plot import save

        save(found, args.plot)
    if failed := [growth.name for growth in found if growth.problem]:
        sys.exit("not measured: " + ", ".join(failed))


def grown(part: Part, sizes: Sequence[int], limit_s: float) -> Growth:
    """A part at some sizes, as far as it could be measured."""
    points: list[Point] = []
    problem = ""
    for size in sizes:
        try:
            points.append(in_a_process(part, size, limit_s))
        except MeasureError as error:
            print(f"{part.name} at {size}: {error}", file=sys.stderr)
            problem = f"at {size}: {str(error).splitlines()[-1]}"
            break
    return Growth(part.name, part.why, part.bound, part.memory_bound, tuple(points), problem)


def lines(found: Sequence[Growth]) -> list[str]:
    """A table for people."""
    head = f"{'part':52s} {'sizes':>22s} {'seconds':>24s} {'exponent':>9s} {'bound':>5s} {'MiB':>10s} {'exponent':>9s}"
    rows = [head]
    for growth in found:
        sizes = ", ".join(f"{p.size}" for p in growth.points)
        seconds = ", ".join(f"{p.cpu_s:.2g}" for p in growth.points)
        peaks = f"{growth.points[-1].peak_bytes / 2**20:.0f}" if growth.points else ""
        verdict = f"   NOT MEASURED {growth.problem}" if growth.problem else "   ABOVE" if growth.is_above else ""
        rows.append(
            f"{growth.name:52s} {sizes:>22s} {seconds:>24s} {_number(growth.exponent):>9s} {growth.bound:5.1f} "
            f"{peaks:>10s} {_number(growth.memory_exponent):>9s}{verdict}"
        )
    return rows


def content_of(found: Sequence[Growth], *, is_full: bool) -> dict[str, Any]:
    """What is written as JSON."""
    figures = [
        {
            **asdict(growth), "exponent": growth.exponent, "memory_exponent": growth.memory_exponent,
            "is_above": growth.is_above,
        }
        for growth in found
    ]  # fmt: skip
    return {"machine": machine(*LIBRARIES), "is_full": is_full, "figures": figures}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
