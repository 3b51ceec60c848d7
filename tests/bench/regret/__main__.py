"""How good the planner's choice is: `python -m tests.bench.regret [--sizes FILE] [--part NAME] [--json FILE]`.

`regret`: 20 problems on 8 and 16 GPUs; the planner's plan against the best of every feasible candidate, all simulated
with the scheduler that runs. `reference`: the reference's literal plan and its formula's own optimum against ours, on
batches nobody planned for: under the same balancer (certified balance; our plan ranked for it), and with each side's
own (ours: the search on the simulator). All figures are simulated on data-sheet costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflop.errors import InfeasiblePlanError
from dflop.plan.baselines.reference import argmin, literal, reference_plan
from dflop.plan.drafts import split_draft
from dflop.plan.formula import formula_table
from dflop.plan.inline import inline_choices
from dflop.plan.search import plan_problem
from dflop.records import Plan
from dflop.schedule.policies import QUICK, Effort, StepJob
from tests.bench.command import keep_to, options
from tests.bench.figures import conclude
from tests.bench.regret.instances import Instance, reference_instances, regret_instances

MAX_REGRET, MIN_SAME_BALANCER, MIN_OWN = 0.01, 1.10, 1.25
EFFORT = Effort(num_ops=10_000_000)


def every_plan(instance: Instance) -> Iterator[Plan]:
    """All feasible drafts of both layouts."""
    problem = instance.problem
    for m in problem.microbatch_choices:
        table = formula_table(problem, m)
        axes = np.meshgrid(*(np.arange(len(t.candidates)) for t in table.modules), indexing="ij")
        for choice in np.stack([a.reshape(-1) for a in axes], axis=1).tolist():
            if table.feasible(choice):
                yield split_draft(problem, m, table.layout(choice), table.objective(choice))
        yield from (plan for _, plan in inline_choices(problem, m, top=None))


def regret_row(instance: Instance) -> dict[str, object]:
    """The chosen plan and the fastest nominee against the best of all."""
    problem = instance.problem
    found = plan_problem(problem, top=40)
    drafts = list(every_plan(instance))
    best_s = min(step_s(problem_plan, instance) for problem_plan in drafts)
    fastest = min(found, key=lambda p: p.predicted_step_s)
    return {
        "instance": instance.name,
        "num_plans": len(drafts),
        "regret_frac": step_s(fastest, instance) / best_s - 1,
        "chosen_frac": step_s(found[0], instance) / best_s - 1,
        "layout": found[0].layout,
    }


def step_s(plan: Plan, instance: Instance) -> float:
    """Mean simulated step of the planning batches; infinite where the scheduler cannot keep to the memory."""
    total = 0.0
    problem = instance.problem
    for batch, items in zip(problem.batches, problem.batch_items, strict=True):
        job = StepJob(plan, batch, problem.cost, items=items)
        _, assignment, seconds = job.best(QUICK)
        if not job.keeps_caps(assignment):
            return float("inf")
        total += seconds + plan.sync_s
    return total / len(problem.batches)


def unseen_s(plan: Plan, instance: Instance, policy: str) -> float:
    """Mean simulated step of batches nobody planned for."""
    jobs = [StepJob(plan, batch, instance.problem.cost) for batch in instance.unseen]
    return float(np.mean([job.judge.step_s(job.assign(policy, EFFORT)) + plan.sync_s for job in jobs]))


def reference_row(instance: Instance) -> dict[str, object]:
    """Speed-ups over the reference's literal plan."""
    problem = instance.problem
    try:
        theirs, fixed = reference_plan(problem, literal), reference_plan(problem, argmin)
    except InfeasiblePlanError as error:
        return {"instance": instance.name, "none": str(error)}
    base_s = unseen_s(theirs.plan, instance, "bottleneck")
    same = plan_problem(problem, policy="bottleneck", effort=EFFORT)[0]
    ours = plan_problem(problem)[0]
    return {
        "instance": instance.name,
        "literal_fits": theirs.fits,
        "argmin": base_s / unseen_s(fixed.plan, instance, "bottleneck"),
        "theirs_our_batches": base_s / unseen_s(theirs.plan, instance, "balanced"),
        "same_balancer": base_s / unseen_s(same, instance, "bottleneck"),
        "own": base_s / unseen_s(ours, instance, "balanced"),
        "layout": ours.layout,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet file of real sample sizes")
    parser.add_argument("--part", choices=("regret", "reference"), help="only this one")
    args = parser.parse_args()
    keep_to(1)
    found: dict[str, list[dict[str, object]]] = {}
    for name, instances, row_of in (
        ("regret", regret_instances, regret_row),
        ("reference", reference_instances, reference_row),
    ):
        if args.part in (None, name):
            found[name] = []
            for instance in instances(args.sizes):
                started = time.process_time()
                found[name].append(row_of(instance))
                cells = "  ".join(
                    f"{k} {v:.4f}" if isinstance(v, float) else f"{v}" for k, v in found[name][-1].items()
                )
                print(f"{cells}  ({time.process_time() - started:.0f} s)", flush=True)
    conclude(found, summarise(found), args.json, "numpy", "numba", "cvxpy")


def summarise(found: dict[str, list[dict[str, object]]]) -> list[tuple[str, bool]]:
    """Prints the figures that have bounds; their names, and whether each is met."""
    lines: list[tuple[str, float, float, bool]] = []
    if rows := found.get("regret"):
        worst = float(np.array([r["regret_frac"] for r in rows], dtype=float).max())
        lines.append(("largest regret of the fastest plan", worst, MAX_REGRET, worst <= MAX_REGRET))
    if rows := [r for r in found.get("reference", []) if "none" not in r]:
        for name, bound in (("same_balancer", MIN_SAME_BALANCER), ("own", MIN_OWN)):
            values = np.array([r[name] for r in rows], dtype=float)
            mean = float(np.exp(np.log(values).mean()))
            lines.append((f"geometric mean over the reference, {name}", mean, bound, mean >= bound))
            lines.append((f"least over the reference, {name}", float(values.min()), 1.0, bool(values.min() >= 1.0)))
    for name, value, bound, is_met in lines:
        print(f"{name:50s} {value:8.4f}   bound {bound:g}   {'ok' if is_met else 'MISSED'}")
    return [(name, is_met) for name, _, _, is_met in lines]


if __name__ == "__main__":
    main()
