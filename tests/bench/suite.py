"""The paper's models planned and compared, simulated: `python -m tests.bench.suite [--suite NAME] [--json FILE]`.

What `dflop compare --suite` does, with this checkout's commit in the figures, and bounds: our plan fits in memory and
is not slower than any that the engine could run, too.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dflop.compare.suite.contest import EXPERTS
from dflop.compare.suite.run_suite import SUITES, run_suite
from dflop.compare.suite.unseen_batches import geometric_mean
from dflop.records.speedup import speedup
from dflop.report.rows import print_rows
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.levers import LEVERS, print_with_hosts, print_without
from tests.bench.markdown import percent, ratio, span, table

TUNED, OURS = "uniform tuned", "dflop"
SHOWN = {
    TUNED: "uniform, arrival order",
    "reference": "the reference's rule",
    "token LPT": "uniform, token LPT",
    "Megatron expert": "Megatron expert",
    "FSDP2": "FSDP2, balanced tokens",
    "FSDP2 + SP": "FSDP2 + SP",
    "Megatron + CP": "Megatron + CP",
    OURS: "**dflop**",
}
WITH_OUR_MEANS = (TUNED, "token LPT", "FSDP2", "reference")
"""Others that run what the engine runs."""
Case = Mapping[str, Any]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="paper")
    parser.add_argument("--picture", type=Path, help="draw it, .png, .svg or .pdf")
    parser.add_argument("--without", nargs="+", choices=LEVERS, help="only what our plans lose without these levers")
    parser.add_argument("--host", nargs="+", metavar="GIB,GB/S", help="only what our plans gain with host memory")
    args = parser.parse_args()
    if args.host:
        pairs = [tuple(map(float, text.split(","))) for text in args.host]
        print_with_hosts([(gib * 2**30, rate * 1e9) for gib, rate in pairs])
        return
    if args.without:
        print_without(args.without)
        return
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        numbers = Path(folder) / "numbers.json"
        pictures = [args.picture] if args.picture else []
        found = run_suite(args.suite, lambda text: print(text, file=sys.stderr, flush=True), pictures, numbers)
        content = json.loads(numbers.read_text())
    print_rows(found.columns, found.rows, "table")
    figures = {key: value for key, value in content.items() if key not in ("machine", "versions", "date")}
    conclude(figures, bounds(figures["cases"]), args.json, "numpy", "numba", "cvxpy")


def bounds(cases: Sequence[Case]) -> list[tuple[str, bool]]:
    """(name, whether it is met), several per case."""
    found = []
    for case in cases:
        name = f"{case['model']}, {case.get('label', case['data'])}"
        found.append((f"{name}: fits", case["num_over_cap"][OURS] == 0))
        for other in WITH_OUR_MEANS:
            if other in case["step_s"]:
                gain = _over(case, other)
                found.append((f"{name}: {gain:.2f}x of {other}", gain >= 1.0))
    return found


PLAN_HEADER = ("model", "data", "dflop", "tokens/s/GPU", "MFU", "best expert", "its plan", "tokens/s/GPU", "MFU")


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`suite`: seconds of a step, and the plans of ours and the best expert's; `suite-short`: what we gain."""
    cases: Sequence[Case] = content["cases"]
    shown = [name for name in SHOWN if any(name in case["step_s"] for case in cases)]
    header = ("model", "data", *(SHOWN[name] for name in shown), "over the best expert", "over arrival order")
    rows = [_row(case, shown) for case in cases]
    for data in dict.fromkeys(case["data"] for case in cases):
        of = [case for case in cases if case["data"] == data]
        uniform = [_over(case, TUNED) for case in of if TUNED in case["step_s"]]
        means = [ratio(geometric_mean(gains)) for gains in ([_over_experts(case) for case in of], uniform)]
        rows.append(("geometric mean", data, *[""] * len(shown), *means))
    return {
        "suite": f"{table(header, rows)}\n\n{_notes(cases)}\n\nThe plans, inline unless they say split, with their "
        f"numbers of microbatches:\n\n{table(PLAN_HEADER, map(_plan_row, cases))}",
        "suite-short": _short(cases),
    }


def _row(case: Case, shown: Sequence[str]) -> tuple[str, ...]:
    uniform = ratio(_over(case, TUNED)) if TUNED in case["step_s"] else ""
    return (case["model"], case["data"], *_cells(case, shown), ratio(_over_experts(case)), uniform)


def _cells(case: Case, shown: Sequence[str]) -> list[str]:
    cells = []
    for name in shown:
        if name not in case["step_s"]:
            cells.append("none fits")
            continue
        text = f"{fmean(case['step_s'][name]):.1f} s{' !' if _exceeds(case, name) else ''}"
        cells.append(f"**{text}**" if name == OURS else text)
    return cells


def _plan_row(case: Case) -> tuple[str, ...]:
    best = _best_expert(case)
    return (case["model"], case["data"], *_plan_cells(case, OURS), best, *_plan_cells(case, best))


def _plan_cells(case: Case, name: str) -> tuple[str, ...]:
    plan = case["plans"][name]
    layout = plan["layout"].removeprefix("inline ")
    return (
        f"{layout}, {plan['num_microbatches']}",
        f"{case['tokens_per_s_per_gpu'][name]:,.0f}",
        percent(case["mfu_frac"][name]),
    )


def _over(case: Case, name: str) -> float:
    """Ours over another's."""
    return speedup(case["step_s"][name], case["step_s"][OURS]).mean


def _best_expert(case: Case) -> str:
    """The fastest of what experts run and holds all batches."""
    held = [name for name in EXPERTS if name in case["step_s"] and not _exceeds(case, name)]
    return min(held, key=lambda name: fmean(case["step_s"][name]))


def _over_experts(case: Case) -> float:
    return _over(case, _best_expert(case))


def _exceeds(case: Case, name: str) -> bool:
    return case["num_over_cap"].get(name, 0) > 0 or (name == "reference" and not case["reference_fits"])


def _notes(cases: Sequence[Case]) -> str:
    bound, of_our_tp = (
        [speedup(case["step_s"][OURS], case[name]).mean for case in cases] for name in ("bound_s", "bound_of_our_tp_s")
    )
    none = ", ".join(f"{case['model']} on {case['data']}" for case in cases if TUNED not in case["step_s"])
    return (
        f"`!`: some of {len(cases[0]['bound_s'])} batches, or the plan itself, exceed memory, so it would not run: the "
        f"tuned uniform plan in arrival order in {_num_over(cases, TUNED)} of {len(cases)} cases, ours in "
        f"{_num_over(cases, OURS)}. {f'No uniform plan fits for {none}. ' if none else ''}Perfect balance without a "
        f"bubble at every module's best tp would be {span(bound, '.1f')} times as fast as ours, at the tp and "
        f"recomputation that memory makes our plans choose {span(of_our_tp)} times."
    )


def _num_over(cases: Sequence[Case], name: str) -> int:
    return sum(_exceeds(case, name) for case in cases)


def _short(cases: Sequence[Case]) -> str:
    uniform = [_over(case, TUNED) for case in cases if TUNED in case["step_s"]]
    experts = [_over_experts(case) for case in cases]
    kinds = dict.fromkeys(f"{case['data']} data" for case in cases)
    of_model: dict[str, list[str]] = {}
    for case, gain in zip(cases, experts, strict=True):
        of_model.setdefault(case["model"], []).append(ratio(gain))
    return (
        f"Whole plans of the paper's models on {cases[0]['num_gpus']} A100, **simulated**, nothing of it measured: "
        f"{ratio(geometric_mean(experts))} as fast as the best of what experts run: uniform and packed by tokens; "
        "Megatron-LM with layers cut by cost, sequence parallelism and recomputed MLPs, or with context parallelism; "
        "FSDP2 with balanced tokens, alone or with Ulysses sequence parallelism.\n\n"
        f"{table(('over the best expert', *kinds), [(model, *gains) for model, gains in of_model.items()])}\n\n"
        f"Over the best uniform plan in arrival order, which exceeds memory in {_num_over(cases, TUNED)} of the "
        f"{len(uniform)} cases where there is one, it is {span(uniform)}x."
    )


if __name__ == "__main__":
    main()
