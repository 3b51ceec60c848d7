"""The paper's models planned and compared, simulated: `python -m tests.bench.suite [--suite NAME] [--json FILE]`.

What `dflop compare --suite` does, with this checkout's commit in the figures, and bounds: our plan fits in memory and
is not slower than the best uniform one.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop.compare.suite.run_suite import SUITES, run_suite
from dflop.compare.suite.unseen_batches import geometric_mean
from dflop.records.speedup import speedup
from dflop.report.rows import print_rows
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.markdown import ratio, span, table

TUNED, OURS = "uniform tuned", "dflop"
OTHERS = {
    "uniform default": "default",
    **{name: name for name in ("token LPT", "Megatron expert", "FSDP2", "reference")},
    OURS: "**dflop**",
}
OLDER = (
    "Whole plans against what experts of other trainers run were not simulated anew since plans may share out "
    "parameters and recompute single layers; `dflop compare --suite paper` does it."
)
EXPERTS = ("token LPT", "Megatron expert", "FSDP2")
WITH_OUR_MEANS = ("token LPT", "FSDP2", "reference")
"""Others that run what the engine runs."""
Case = Mapping[str, Any]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="paper")
    parser.add_argument("--picture", type=Path, help="draw it, .png, .svg or .pdf")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        numbers = Path(folder) / "numbers.json"
        pictures = [args.picture] if args.picture else []
        found = run_suite(args.suite, lambda text: print(text, file=sys.stderr, flush=True), pictures, numbers)
        content = json.loads(numbers.read_text())
    print_rows(found.columns, found.rows, "table")
    figures = {key: value for key, value in content.items() if key not in ("machine", "versions", "date")}
    conclude(figures, bounds(figures["cases"]), args.json, "numpy", "numba", "cvxpy")


def bounds(cases: Sequence[Case]) -> list[tuple[str, bool]]:
    """(name, whether it is met), several of every case that has both plans."""
    found = []
    for case in cases:
        gain = _gain(case, OURS) if TUNED in case["step_s"] else None
        if gain is not None:
            name = f"{case['model']}, {case.get('label', case['data'])}"
            found.append((f"{name}: fits", case["num_over_cap"][OURS] == 0))
            for other in (TUNED, *WITH_OUR_MEANS):
                if other in case["step_s"]:
                    over = gain / (_gain(case, other) or 1.0)
                    found.append((f"{name}: {over:.2f}x of {other}", over >= 1.0))
    return found


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`suite`: speed-ups over the best uniform plan, and which plans exceed memory; `suite-short`: a sentence."""
    cases: Sequence[Case] = content["cases"]
    if any("FSDP2" not in case["step_s"] for case in cases):
        return {"suite": _notes(cases), "suite-short": OLDER}  # of before experts competed
    rows = [(case["model"], case["data"], *_cells(case), ratio(_over_experts(case))) for case in cases]
    for data in dict.fromkeys(case["data"] for case in cases):
        of = [case for case in cases if case["data"] == data]
        over = ratio(geometric_mean([_over_experts(case) for case in of]))
        rows.append(("geometric mean", data, *(_mean(of, name) for name in OTHERS), over))
    head = f"model on {cases[0]['num_gpus'] // 8} nodes of 8 A100"
    header = (head, "data", *OTHERS.values(), "dflop over the best expert")
    return {"suite": f"{table(header, rows)}\n\n{_notes(cases)}", "suite-short": _short(cases)}


def _over_experts(case: Case) -> float:
    """Ours over the fastest of what experts run; NaN where none of their plans fits."""
    held = [name for name in EXPERTS if name in case["step_s"] and not _exceeds(case, name)]
    ours = case["step_s"][OURS]
    return min((speedup(case["step_s"][name], ours).mean for name in held), default=math.nan)


def _gain(case: Case, name: str) -> float | None:
    if name not in case["step_s"]:
        return None
    return speedup(case["step_s"][TUNED], case["step_s"][name]).mean


def _exceeds(case: Case, name: str) -> bool:
    return case["num_over_cap"].get(name, 0) > 0 or (name == "reference" and not case["reference_fits"])


def _num_over(cases: Sequence[Case], name: str = TUNED) -> int:
    return sum(_exceeds(case, name) for case in cases)


def _cells(case: Case) -> list[str]:
    cells = []
    for name in OTHERS:
        gain = _gain(case, name)
        text = "none fits" if gain is None else f"{ratio(gain)}{' !' if _exceeds(case, name) else ''}"
        cells.append(f"**{text}**" if name == OURS else text)
    return cells


def _mean(cases: Iterable[Case], name: str) -> str:
    gains = [_gain(case, name) for case in cases]
    known = [gain for gain in gains if gain is not None]
    text = ratio(geometric_mean(known)) if len(known) == len(gains) else ""
    return f"**{text}**" if name == OURS else text


def _notes(cases: Sequence[Case]) -> str:
    bound, of_our_tp = (
        [speedup(case["step_s"][OURS], case[name]).mean for case in cases] for name in ("bound_s", "bound_of_our_tp_s")
    )
    return (
        f"`!`: some of {len(cases[0]['bound_s'])} batches, or the plan itself, exceed memory, so it would not run. The "
        f"baseline itself, the tuned uniform plan in arrival order, exceeds it in {_num_over(cases)} of "
        f"the {len(cases)} cases, ours in {_num_over(cases, OURS)}: there the speed-up is over a step that no machine "
        f"could take. Perfect balance without a bubble at every module's best tp would be {span(bound, '.1f')} times "
        f"as fast as ours, at the tp and recomputation that memory makes our plans choose {span(of_our_tp)} times."
    )  # fmt: skip


def _short(cases: Sequence[Case]) -> str:
    gains = [gain for case in cases if (gain := _gain(case, OURS)) is not None]
    over = [gain for case in cases if not math.isnan(gain := _over_experts(case))]
    return (
        f"Whole plans of the paper's models on {cases[0]['num_gpus']} A100, **simulated**, nothing of it measured: "
        f"{span(over)}x of the best of what experts run (uniform and packed by tokens; Megatron-LM with layers cut by "
        "cost, sequence parallelism and recomputed MLPs; FSDP2 with balanced tokens), and "
        f"{span(gains)}x of the best uniform plan in arrival order, which exceeds memory in {_num_over(cases)} of the "
        f"{len(cases)} cases."
    )


if __name__ == "__main__":
    main()
