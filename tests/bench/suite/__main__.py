"""The paper's models planned and compared, simulated: `python -m tests.bench.suite [--suite NAME] [--json FILE]`.

What `dflop compare --suite` does, with this checkout's commit beside the figures, and bounds: our plan fits in memory
and is not slower than the best uniform one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop.jobs.suite.judge import speedup
from dflop.jobs.suite.run import SUITES, run_suite
from dflop.report.rows import print_rows
from tests.bench.command import options
from tests.bench.figures import conclude

OURS, TUNED = "dflop", "uniform tuned"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="paper")
    parser.add_argument("--picture", type=Path, help="draw it, .png, .svg or .pdf")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        numbers = Path(folder) / "numbers.json"
        found = run_suite(args.suite, _say, [args.picture] if args.picture else [], numbers)
        told = json.loads(numbers.read_text())
    print_rows(found.columns, found.rows, "table")
    content = {key: value for key, value in told.items() if key not in ("machine", "versions", "date")}
    conclude(content, bounds(content["cases"]), args.json, "numpy", "numba", "cvxpy")


def bounds(cases: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """(name, whether it is met), two of every case that has both plans."""
    found = []
    for case in cases:
        if {OURS, TUNED} <= case["step_s"].keys():
            name = f"{case['model']}, {case.get('label', case['data'])}"
            gain = speedup(case["step_s"][TUNED], case["step_s"][OURS])
            found.append((f"{name}: fits", case["num_over_cap"][OURS] == 0))
            found.append((f"{name}: {gain.mean:.2f}x of the best uniform plan", gain.mean >= 1.0))
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
