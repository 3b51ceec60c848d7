"""Fuzzing of what comes from outside, for a bounded time: `python -m tests.fuzz --minutes 10`.

Every target runs in its own process for an equal share of the time. A crash is shown with its smallest example and the
command that runs it again, and kept in `.fuzz`: the next campaign begins with it. Ends with 1 where there is one.
"""

import argparse
import signal
import sys
from pathlib import Path

from tests.bench import figures
from tests.fuzz import page
from tests.fuzz.engine import in_process
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; repeatable")
    parser.add_argument("--seed", type=int, default=1, help="of the first slice of every target")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # with the process of the target
    command, results = f"python -m tests.fuzz --minutes {args.minutes:g} --seed {args.seed}", []
    names = args.target or list(TARGETS)
    for name in names:
        found = in_process(name, Path(".fuzz"), args.minutes * 60 / len(names), args.seed)
        results.append({"target": name, "what": TARGETS[name].what, **found})
        for crash in found["crashes"]:
            print(f"{name}: {crash}\nagain: {command} --target {name}", file=sys.stderr)
        print(f"{name}: {found['num_examples']} examples in {found['elapsed_s']:.0f} s", file=sys.stderr, flush=True)
    content = {"machine": figures.machine("hypothesis"), "command": command, "targets": results}
    print("\n\n".join(page.tables(content).values()))
    if args.json is not None:
        args.json.write_text(figures.json_text(content), encoding="utf-8")
    return int(any(found["crashes"] for found in results))


if __name__ == "__main__":
    raise SystemExit(main())
