"""All benchmarks: `python -m tests.bench [--full] [--part NAME ...] [--sizes TABLE] [--media DIR]`.

Parts run one after the other, each in a process of its own; what they print passes through, and a table of all comes
last. Figures go to `tests/bench/results/<machine>/<part>-<date>.json`. Without --full, parts are smaller or left out,
20 minutes on two cores. Ends with 1 when a part failed or missed a bound, and says which. Nothing else should run on
the machine. `python -m tests.bench.pages` then puts the figures into the documents.
"""

from __future__ import annotations

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
from tests.bench.parts import NEEDS, PARTS, Part, chosen


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    verdict: str
    """`ok`, `missed`, `failed` or `left out`."""
    minutes: float = 0.0
    num_bounds: int = 0
    missed: tuple[str, ...] = ()
    detail: str = ""
    """Its file, or why there is none."""

    @property
    def is_good(self) -> bool:
        return self.verdict in ("ok", "left out")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", metavar="NAME", help="only these; --list names them")
    parser.add_argument("--full", action="store_true", help="measure every part, and whole; hours")
    for name in ("sizes", "media"):
        parser.add_argument(f"--{name}", type=Path, help=NEEDS[name].partition(":")[0])
    parser.add_argument("--slurm", action="store_true", help="jobs may be submitted to this machine's Slurm")
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    args = parser.parse_args()
    try:
        parts = chosen(args.part, args.full)
    except ValueError as error:
        parser.error(str(error))
    paths = {name: path for name in ("sizes", "media") if (path := getattr(args, name))}
    if absent := [f"--{name} {path}" for name, path in paths.items() if not path.exists()]:
        parser.error(f"{', '.join(absent)}: no such file or folder")
    given = {name: str(path.resolve()) for name, path in paths.items()} | ({"slurm": ""} if args.slurm else {})
    if args.list:
        print("\n".join(listing(parts, given, args.full)))
        return
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts, start=1):
        _say(f"[{number}/{len(parts)}] {part.name}, about {part.minutes_of(args.full):g} min: {part.what}")
        outcomes.append(measured(part, given, args.out.resolve(), is_full=args.full))
        _say(f"[{number}/{len(parts)}] {part.name}: {outcomes[-1].verdict} {outcomes[-1].detail}")
    print("\n".join(["", *summary(outcomes)]))
    if bad := [f"{o.part} ({o.verdict})" for o in outcomes if not o.is_good]:
        sys.exit("not good: " + ", ".join(bad))


def measured(part: Part, given: Mapping[str, str], out: Path, *, is_full: bool) -> Outcome:
    """Runs one part and keeps its figures, and the pictures next to them, in this machine's folder of `out`.

    Args:
        part: In a process of its own, so that a failure ends nothing else.
        given: Options by name, and their values.
        out: Gets a folder per machine.
        is_full: Whether the part is measured whole.
    """
    if without := part.missing(given):
        return Outcome(part.name, "left out", detail=f"needs {'; '.join(without)}")
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
            detail = f"exit code {code}" if code else "it wrote no figures"
            return Outcome(part.name, "failed", minutes, detail=detail)
        about = {"command": part.shown_command(given, is_full), "minutes": round(minutes, 1)}
        path.write_text(json_text(content | about))
        folder = out / slug(found)
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(name).iterdir():
            shutil.move(file, folder / file.name)
    verdict = "missed" if missed else "ok"
    return Outcome(part.name, verdict, minutes, content.get("num_bounds", 0), missed, str(folder / path.name))


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """A table for people; names of missed bounds stand below it."""
    lines = [f"{'part':22s} {'minutes':>7s} {'bounds met':>10s}  {'':9s} file"]
    for o in outcomes:
        met = f"{o.num_bounds - len(o.missed)}/{o.num_bounds}" if o.num_bounds else ""
        lines.append(f"{o.part:22s} {o.minutes:7.1f} {met:>10s}  {o.verdict:9s} {o.detail.removeprefix(f'{ROOT}/')}")
    return lines + [f"{o.part} missed: {name}" for o in outcomes for name in o.missed]


def listing(parts: Sequence[Part], given: Mapping[str, str], is_full: bool) -> list[str]:
    """The parts that would run, and those that would be left out."""
    lines = [f"{'part':22s} {'minutes':>7s}  what"]
    for part in parts:
        without = "; ".join(part.missing(given))
        left_out = f" (left out: needs {without})" if without else ""
        lines.append(f"{part.name:22s} {part.minutes_of(is_full):7.1f}  {part.what}{left_out}")
    minutes = sum(part.minutes_of(is_full) for part in parts if not part.missing(given))
    others = ", ".join(part.name for part in PARTS if part not in parts)
    return [*lines, f"{'all':22s} {minutes:7.1f}", *([f"not asked for: {others}"] if others else [])]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
