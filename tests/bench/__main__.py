"""All benchmarks: `python -m tests.bench [--full] [--part NAME ...] [--sizes TABLE] [--media DIR]`.

Parts run one after the other, each in a process of its own; what they print passes through, and a table of all comes
last. Figures go to `tests/bench/results/<machine>/<part>-<date>.json`. Without --full, parts are smaller or left out,
20 minutes on two cores. Ends with 1 when a part failed or missed a bound, and says which. Nothing else should run on
the machine. `python -m tests.bench.pages` then puts the figures into the documents.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.campaign import RESULTS, Outcome, missing, run, summary
from tests.bench.parts import NEEDS, PARTS, Part, chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", metavar="NAME", help="only these; --list names them")
    parser.add_argument("--full", action="store_true", help="measure every part, and whole; hours")
    for name in ("sizes", "media", "times"):
        parser.add_argument(f"--{name}", type=Path, help=NEEDS[name].partition(":")[0])
    parser.add_argument("--slurm", action="store_true", help="jobs may be submitted to this machine's Slurm")
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    args = parser.parse_args()
    try:
        parts = chosen(args.part, args.full)
    except ValueError as error:
        parser.error(str(error))
    paths = {name: path for name in ("sizes", "media", "times") if (path := getattr(args, name))}
    if absent := [f"--{name} {path}" for name, path in paths.items() if not path.exists()]:
        parser.error(f"{', '.join(absent)}: no such file or folder")
    given = {name: str(path.resolve()) for name, path in paths.items()} | ({"slurm": ""} if args.slurm else {})
    if args.list:
        print("\n".join(listing(parts, given, args.full)))
        return
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(run(parts, given, args.out.resolve(), is_full=args.full))
    except KeyboardInterrupt:
        print("\n".join(["", *summary(outcomes)]))
        sys.exit("stopped; the parts above are done")
    print("\n".join(["", *summary(outcomes), *others(parts)]))
    if bad := [f"{o.part} ({o.verdict})" for o in outcomes if not o.is_good]:
        sys.exit("not good: " + ", ".join(bad))


def listing(parts: list[Part], given: dict[str, str], is_full: bool) -> list[str]:
    """The parts that would run, and those that would be left out."""
    lines = [f"{'part':22s} {'minutes':>7s}  what"]
    for part in parts:
        without = "; ".join(missing(part, given))
        left_out = f" (left out: needs {without})" if without else ""
        lines.append(f"{part.name:22s} {part.minutes_of(is_full):7.1f}  {part.what}{left_out}")
    minutes = sum(part.minutes_of(is_full) for part in parts if not missing(part, given))
    return [*lines, f"{'all':22s} {minutes:7.1f}", *others(parts)]


def others(parts: list[Part]) -> list[str]:
    """What is not among `parts`, in words; nothing where all are."""
    names = [part.name for part in PARTS if part not in parts]
    return [f"not asked for: {', '.join(names)}"] if names else []


if __name__ == "__main__":
    main()
