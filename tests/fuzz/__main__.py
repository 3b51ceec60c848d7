"""Fuzzing of what comes from outside, for a bounded time: `python -m tests.fuzz --minutes 10`.

Every target has a process of its own and an equal share of the time. A crash is shown with its smallest example and the
command that runs it again, and kept in `.fuzz`: the next campaign begins with it. Ends with 1 where there is one.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.bench import figures
from tests.fuzz import page
from tests.fuzz.engine import Crash, fuzz
from tests.fuzz.targets import TARGETS

DATABASE = Path(".fuzz")
MEMORY_BYTES = 12 << 30
"""Address space of a target's process: what draws more than that is a crash, too."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; repeatable")
    parser.add_argument("--seed", type=int, default=1, help="of the first slice of every target")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    names, results = args.target or list(TARGETS), []
    for number, name in enumerate(names, 1):
        found = campaign_of(name, args.minutes * 60 / len(names), args.seed)
        results.append(found)
        counts = f"{found['num_examples']} examples in {found['elapsed_s']:.0f} s, {len(found['crashes'])} crashes"
        _say(f"{number}/{len(names)} {name}: {counts}")
    command = f"python -m tests.fuzz --minutes {args.minutes:g} --seed {args.seed}"
    given = {"command": command, "minutes": args.minutes, "seed": args.seed}
    content = {"machine": figures.machine("hypothesis"), **given, "targets": results}
    print("\n\n".join(page.tables(content).values()))
    if args.json is not None:
        args.json.write_text(figures.json_text(content), encoding="utf-8")
    return int(any(found["crashes"] for found in results))


def campaign_of(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """What came of a target, in a process of its own, as JSON has it; the death of that process is a crash, too."""
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="dflop-fuzz-") as folder,  # what a killed target leaves goes with it
        ProcessPoolExecutor(1, get_context("spawn"), _begin, (folder,)) as pool,
    ):
        last = Path(folder) / "last"
        try:
            num_examples, crashes = pool.submit(_run, name, folder, seconds, seed, DATABASE.resolve()).result()
        except BrokenProcessPool as error:
            example = last.read_text(encoding="utf-8") if last.is_file() else ""
            num_examples, crashes = 0, [Crash("the process died", seed, example, str(error))]
    for crash in crashes:
        _say(f"{name}: {crash.name}\n{crash.trace}\nexample: {crash.example}")
        _say(f"again: python -m tests.fuzz --target {name} --minutes 1 --seed {crash.seed}")
    told = [{"name": crash.name, "seed": crash.seed, "example": crash.example} for crash in crashes]
    elapsed_s = time.monotonic() - began_s
    return {"target": name, "num_examples": num_examples, "elapsed_s": elapsed_s, "crashes": told,
            "what": TARGETS[name].what}  # fmt: skip


def _begin(folder: str) -> None:
    """Of the process of a target: bounded, and what code under test prints is not ours to say."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(name: str, folder: str, seconds: float, seed: int, database: Path) -> tuple[int, list[Crash]]:
    found = fuzz(TARGETS[name], Path(folder), seconds=seconds, first_seed=seed, database=database)
    return found.num_examples, list(found.crashes.values())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
