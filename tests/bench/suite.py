"""Whole plans of published models, simulated: `python -m tests.bench.suite [--suite NAME] [--json FILE]`.

dflop's plan next to every baseline of `dflop compare` and, on the paper's models, next to the reference's rule. Costs
are those of data sheets, samples are drawn. `suites.py` says which settings a suite has. Every setting's figures are
written when they are there. Bounds: our plan fits in memory, is not slower than any that the engine could run, too, and
at the price of a compiled program as many times as fast as the best compiled expert's as its suite asks.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflop.compare.contest import (
    COMPILED,
    EXPERTS,
    IF_COMPILED,
    OURS,
    PLANNERS,
    TUNED,
    Contest,
    compete,
    entry_text,
    if_compiled,
    rivals,
)
from dflop.compare.experts.expert_plan import ExpertPlan
from dflop.compare.unseen_batches import bound_s, module_gpu_seconds
from dflop.plan.drafts import fits
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape
from dflop.records.speedup import speedup
from dflop.report.plots import check_suffix
from tests.bench.cases import CASES, make_setting
from tests.bench.command import options
from tests.bench.figures import conclude, json_text, machine
from tests.bench.levers import LEVERS, print_without
from tests.bench.mixtures import MAIN
from tests.bench.reference import reference_plan
from tests.bench.suite_picture import save_picture
from tests.bench.suite_tables import REFERENCE, Case, best_expert, tables
from tests.bench.suites import MIN_GAINS, SUITES, Row

WITH_OUR_MEANS = (TUNED, "token LPT", "FSDP2", REFERENCE)
"""Others that run what the engine runs."""
LIBRARIES = ("numpy", "numba", "cvxpy")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="paper")
    parser.add_argument("--sizes", type=Path, help="table of real sample sizes, which the suite `real` draws from")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the settings in whose names this is")
    parser.add_argument("--rivals", type=Path, help="an earlier result: our plans anew, the others' figures from there")
    parser.add_argument("--picture", type=Path, help="draw the paper's models, .png, .svg or .pdf")
    parser.add_argument("--without", nargs="+", choices=LEVERS, help="only what our plans lose without these levers")
    args = parser.parse_args()
    if args.without:
        print_without(args.without)
        return
    if args.picture:
        check_suffix(args.picture)
    plan_problem(make_setting(CASES[0], MAIN, num_nodes=1, global_batch_size=16, num_unseen=0).problem)  # compiles
    content: dict[str, Any] = {"suite": args.suite, "simulated": True, "cases": []}
    known: Sequence[Case] = ()
    if args.rivals:
        earlier = json.loads(args.rivals.read_text())
        known = earlier["cases"]
        content["rivals_commit"] = earlier.get("rivals_commit") or earlier["machine"]["commit"]
    for row in SUITES[args.suite](args.sizes):
        if args.only in row.label:
            content["cases"].append(measured(row, lambda text: print(text, file=sys.stderr, flush=True), known))
            if args.json:
                args.json.write_text(json_text({"machine": machine(*LIBRARIES), **content}))
    cases = content["cases"]
    print("\n\n".join(tables(content).values()))
    if args.picture:
        save_picture(cases, args.picture)
    conclude(content, bounds(cases, MIN_GAINS.get(args.suite, 1.0)), args.json, *LIBRARIES)


def measured(row: Row, say: Callable[[str], None], known: Sequence[Case] = ()) -> dict[str, Any]:
    """Plans a setting with all planners, judges the plans on its unseen batches, and gives all numbers; seconds.

    Of a setting that is `known`, only our plan is made anew.
    """
    say(row.label)
    problem = row.setting.problem
    space = dataclasses.replace(problem.space, host_bytes=row.host_bytes, host_bytes_per_s=row.host_bytes_per_s)
    started_s = time.process_time()
    ours = plan_problem(dataclasses.replace(problem, space=space), progress=say)[0]
    plan_cpu_s = time.process_time() - started_s
    planners = {**PLANNERS, REFERENCE: reference_entry} if row.with_all else {n: PLANNERS[n] for n in EXPERTS}
    entries, bound = (
        {OURS: ExpertPlan(ours, problem.cost, "balanced"), **if_compiled(row.setting, ours)},
        [bound_s(problem, b) for b in row.setting.unseen],
    )
    old = next((of for of in known if (of["label"] == row.label if row.is_compiled else of["bound_s"] == bound)), None)
    if row.is_compiled and old is None:
        raise SystemExit(f"--rivals has no {row.label}")
    if old is None:
        entries |= rivals(problem, ours, say, planners, row.setting.compiled)
    numbers = numbers_of(compete(row.setting, entries, say))
    if old is not None:  # the same batches and costs
        both = {name: {**old[name], **of} for name, of in numbers.items() if isinstance(of, dict)}
        numbers |= both | {name: old[name] for name in ("baseline", "reference_fits")}
    return {"label": row.label, **numbers, "plan_cpu_s": plan_cpu_s, "cpu_s": time.process_time() - started_s}


def reference_entry(problem: Problem) -> ExpertPlan:
    """What the reference's literal rule would run, with our batches."""
    return ExpertPlan(reference_plan(problem).plan, problem.cost, "balanced")


def numbers_of(one: Contest) -> dict[str, Any]:
    """Everything of a setting in full."""
    setting, ours = one.setting, one.ours
    throughput = {name: setting.workload.throughput(steps.mean_s, None) for name, steps in one.steps.items()}
    return {
        "model": setting.name,
        "data": setting.mixture,
        "costs": setting.cost_name,
        "num_gpus": setting.num_gpus,
        "baseline": one.baseline,
        "global_batch_size": setting.problem.global_batch_size,
        "step_s": {name: list(steps.step_s) for name, steps in one.steps.items()},
        "idle_frac": {name: steps.mean_idle_frac for name, steps in one.steps.items()},
        "mfu_frac": {name: means.mfu_frac for name, means in throughput.items()},
        "tokens_per_s_per_gpu": {name: means.tokens_per_s_per_gpu for name, means in throughput.items()},
        "num_over_cap": {name: steps.num_over_cap for name, steps in one.steps.items()},
        "bound_s": list(one.bound_s),
        "bound_of_our_tp_s": [bound_of_plan_s(setting.problem, ours, batch) for batch in setting.unseen],
        "reference_fits": REFERENCE in one.entries and fits(setting.problem, one.entries[REFERENCE].plan),
        "plans": {
            name: {
                "layout": entry_text(entry),
                "num_microbatches": entry.plan.num_microbatches,
                "peak_bytes": max(peak for m in entry.plan.modules for peak in m.stage_memory_bytes),
                "plan_id": entry.plan.plan_id,
            }
            for name, entry in one.entries.items()
        },
    }


def bound_of_plan_s(problem: Problem, plan: Plan, batch: Sequence[SampleShape]) -> float:
    """As `bound_s`, at the tp and the recomputation that a plan chose: what of its distance they explain.

    Where microbatches differ in how many layers run again, that of the mean one.
    """
    mean = sum(s.num_llm_tokens for s in batch) / (plan.num_microbatches * plan.module(LLM).parallel.dp)
    placed = {m.module: (m.parallel.tp, m.recomputed_frac(num_tokens=mean)) for m in plan.modules}
    busy_s = (module_gpu_seconds(problem, spec, batch, *placed[spec.module]) for spec in problem.specs)
    return sum(busy_s) / problem.cluster.num_processes


def bounds(cases: Sequence[Case], min_gain: float) -> list[tuple[str, bool]]:
    """(name, whether it is met), several per case."""
    found = []
    for case in cases:
        found.append((f"{case['label']}: fits", case["num_over_cap"][OURS] == 0))
        asked = dict.fromkeys((name for name in WITH_OUR_MEANS if name in case["step_s"]), 1.0)
        for other, least in {**asked, **({best: min_gain} if (best := best_expert(case)) else {})}.items():
            ours = IF_COMPILED if other in COMPILED else OURS
            gain = speedup(case["step_s"][other], case["step_s"][ours]).mean
            found.append((f"{case['label']}: {gain:.3f}x of {other}", gain >= least))
    return found


if __name__ == "__main__":
    main()
