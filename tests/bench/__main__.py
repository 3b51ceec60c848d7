"""All benchmarks: `python -m tests.bench [--full] [--part NAME ...] [--sizes TABLE] [--media DIR]`.

Parts run one after the other, each in a process of its own; what they print passes through, and a table of all comes
last. Figures go to `tests/bench/results/<machine>/<part>-<date>.json`. Without --full, parts are smaller or left out,
20 minutes on two cores. Ends with 1 when a part failed or missed a bound, and says which. Nothing else should run on
the machine. `python -m tests.bench.pages` then puts the figures into the documents.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import RESULTS, ROOT, json_text, machine, slug
from tests.bench.parts import GIVEN, PARTS, Part, chosen


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    verdict: str
    """`ok`, `missed` or `failed`."""
    minutes: float
    detail: str
    """Its file, or why there is none."""
    num_bounds: int = 0
    missed: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", nargs="+", metavar="NAME", choices=[p.name for p in PARTS], help="only these; --list names them"
    )
    parser.add_argument("--full", action="store_true", help="measure every part, and whole; hours")
    for name, what in GIVEN.items():
        parser.add_argument(f"--{name}", type=Path, help=what)
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    args = parser.parse_args()
    parts = chosen(args.part, args.full)
    given = {name: str(path.resolve()) for name in GIVEN if (path := getattr(args, name))}
    if args.list:
        print("\n".join(listing(parts, args.full)))
        return
    outcomes = []
    for part in parts:
        print(f"{part.name}, about {part.minutes_of(args.full):g} min: {part.what}", file=sys.stderr, flush=True)
        outcomes.append(measured(part, given, RESULTS, is_full=args.full))
    print("\n".join(["", *summary(outcomes)]))
    if bad := [f"{o.part} ({o.verdict})" for o in outcomes if o.verdict != "ok"]:
        sys.exit("not good: " + ", ".join(bad))


def measured(part: Part, given: Mapping[str, str], out: Path, *, is_full: bool) -> Outcome:
    """Runs one part and keeps its figures, and the pictures next to them, in this machine's folder of `out`.

    Args:
        part: In a process of its own, so that a failure ends nothing else.
        given: Options by name, and their values.
        out: Gets a folder per machine.
        is_full: Whether the part is measured whole.
    """
    found = machine()
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as name:
        path = Path(name) / f"{part.result_name(is_full)}-{found['date']}.json"
        started = time.monotonic()
        command = [sys.executable, *part.command(given, path, is_full)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        minutes = (time.monotonic() - started) / 60
        content = json.loads(path.read_text()) if path.is_file() else {}
        missed = tuple(content.get("missed", ()))
        if not content or (code and not missed):
            return Outcome(part.name, "failed", minutes, f"exit code {code}" if code else "it wrote no figures")
        about = {"command": part.shown_command(given, is_full), "minutes": round(minutes, 1)}
        path.write_text(json_text(content | about))
        folder = out / slug(found)
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(name).iterdir():
            shutil.move(file, folder / file.name)
    verdict = "missed" if missed else "ok"
    return Outcome(part.name, verdict, minutes, str(folder / path.name), content.get("num_bounds", 0), missed)


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """A table for people; names of missed bounds stand below it."""
    lines = [f"{'part':22s} {'minutes':>7s} {'bounds met':>10s}  {'':9s} file"]
    for o in outcomes:
        met = f"{o.num_bounds - len(o.missed)}/{o.num_bounds}"
        lines.append(f"{o.part:22s} {o.minutes:7.1f} {met:>10s}  {o.verdict:9s} {o.detail.removeprefix(f'{ROOT}/')}")
    return lines + [f"{o.part} missed: {name}" for o in outcomes for name in o.missed]


def listing(parts: Sequence[Part], is_full: bool) -> list[str]:
    """The parts that would run, and the others."""
    lines = [f"{'part':22s} {'minutes':>7s}  what"]
    lines += [f"{part.name:22s} {part.minutes_of(is_full):7.1f}  {part.what}" for part in parts]
    lines.append(f"{'all':22s} {sum(part.minutes_of(is_full) for part in parts):7.1f}")
    return [*lines, f"not asked for: {', '.join(part.name for part in PARTS if part not in parts)}"]


if __name__ == "__main__":
    main()
