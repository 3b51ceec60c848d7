"""Fuzzing of what comes from outside, for a bounded time: `python -m tests.fuzz --minutes 10`.

Every target runs in its own process for an equal share of the time. A crash is shown with its smallest example and the
command that runs it again, and kept in `.fuzz`: the next campaign begins with it. Ends with 1 where there is one.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from tests.bench import figures
from tests.fuzz import page
from tests.fuzz.engine import in_process
from tests.fuzz.targets import TARGETS

DATABASE = Path(".fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; repeatable")
    parser.add_argument("--seed", type=int, default=1, help="of the first slice of every target")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # with the process of the target
    names = args.target or list(TARGETS)
    results = [campaign_of(name, args.minutes * 60 / len(names), args.seed) for name in names]
    content = {
        "machine": figures.machine("hypothesis"),
        "command": f"python -m tests.fuzz --minutes {args.minutes:g} --seed {args.seed}",
        "minutes": args.minutes,
        "seed": args.seed,
        "targets": results,
    }
    print("\n\n".join(page.tables(content).values()))
    if args.json is not None:
        args.json.write_text(figures.json_text(content), encoding="utf-8")
    return int(any(found["crashes"] for found in results))


def campaign_of(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """What came of a target, as JSON has it."""
    found = in_process(name, DATABASE, seconds, seed)
    for crash in found.crashes:
        _say(f"{name}: {crash}\nagain: python -m tests.fuzz --target {name} --minutes 1 --seed {seed}")
    _say(f"{name}: {found.num_examples} examples in {found.elapsed_s:.0f} s, {len(found.crashes)} crashes")
    return {"target": name, "what": TARGETS[name].what, **vars(found)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
