"""Which of the ranked plans runs, and why, in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflop import units
from dflop.plan.rank import Ranked
from dflop.records import LLM, Plan, PlanProgram

SIMPLICITY_FRAC = 0.05
"""How much slower the fastest plan on one grid may be than the fastest with dedicated ranks and still be preferred: it
needs no routing between modules, and a gain this small does not survive an error of the cost model."""
SHARING_FRAC = 0.01
"""The same of plans without and with ranks that share samples, which exchange keys and values in every layer."""
TIE_FRAC = 0.07
"""Between plans by a data sheet: half of 26 ratios of published layouts are predicted within it (docs/appendix.md)."""
WORTH_IT = 1.05
"""Speed-up over the tuned data-blind plan below which a change of trainer is not worth it."""


def prefer_simple(ranked: Sequence[Ranked]) -> list[Ranked]:
    """The same plans, a simpler one in front that is not much slower than the fastest.

    That is the fastest colocated one within `SIMPLICITY_FRAC`, then the fastest of these without context parallelism
    within `SHARING_FRAC`.
    """
    found = list(ranked)
    for max_cp, slower_frac in ((math.inf, SIMPLICITY_FRAC), (1, SHARING_FRAC)):
        simple = (i for i, r in enumerate(found) if r.is_final and len(r.plan.grids) == 1 and _cp(r.plan) <= max_cp)
        i = next(simple, 0)
        if i and found[i].noisy_step_s <= (1 + slower_frac) * found[0].noisy_step_s:
            found.insert(0, found.pop(i))
    return found


def _cp(plan: Plan) -> int:
    return plan.module(LLM).parallel.cp


def reason(ranked: Ranked, candidates: Sequence[Ranked], policy: str = "balanced", tie_frac: float = 0.0) -> str:
    """One paragraph on a plan: the first on why it was chosen, the others on how far behind they are.

    Args:
        ranked: One of `candidates`.
        candidates: Best first.
        policy: What makes its microbatches.
        tie_frac: Difference below which costs cannot tell plans apart; 0: nothing is known of it.
    """
    best, plan = candidates[0], ranked.plan
    if ranked is best:
        sentences = [_chosen(plan, candidates), _tie(candidates, tie_frac), _gain(plan, policy), _worth(plan)]
        return " ".join(s for s in sentences if s)
    ratio = units.ratio(plan.predicted_step_s / best.plan.predicted_step_s)
    return f"{ratio} the step time of the chosen plan" + ", estimated by a quick search" * (not ranked.is_final)


def unused(plan: Plan, num_processes: int) -> str:
    """A clause where a plan leaves processes of the cluster without work; empty: it leaves none."""
    return f"uses {plan.num_processes} of {num_processes} processes" * (plan.num_processes < num_processes)


def proven(programs: Sequence[PlanProgram]) -> list[str]:
    """What programs prove together, as a line; none where there was nothing to prove."""
    bound_s = min((p.bound_s for p in programs), default=math.inf)
    if math.isinf(bound_s):
        return []
    num_solved = sum(p.num_columns_left > 0 for p in programs)
    best_s = min(p.objective_s for p in programs)
    gap = "" if best_s <= bound_s * (1 + 1e-9) else f", the best known one takes {units.seconds(best_s)}"
    counts, solved = units.counted(len(programs), "number"), units.counted(num_solved, "program")
    return [
        f"proven for the planning formula, not for simulated steps: no plan is below {units.seconds(bound_s)} "
        f"at {counts} of microbatches{gap}; {solved} solved, {len(programs) - num_solved} settled by bounds"
    ]


def optimality(plan: Plan, programs: Sequence[PlanProgram]) -> str:
    """A sentence on how far a plan is from the bound that programs prove of all plans; empty where none do."""
    bound_s = min((p.bound_s for p in programs), default=math.inf)
    if math.isinf(bound_s) or not math.isfinite(plan.formula_step_s):
        return ""
    beyond_frac = plan.formula_step_s / bound_s - 1
    if beyond_frac < 1e-6:
        return "By the planning formula it is the proven optimum."
    return f"By the planning formula it takes {units.percent(beyond_frac)} more than the proven bound of all plans."


def _chosen(plan: Plan, candidates: Sequence[Ranked]) -> str:
    fastest = min((r.plan for r in candidates if r.is_final), key=lambda p: p.predicted_step_s)
    many = units.counted(plan.num_microbatches, "microbatch", "microbatches")
    step = f"{units.seconds(plan.predicted_step_s)} per step with {many} {_where(plan)}"
    if fastest.predicted_step_s < plan.predicted_step_s * 0.999:
        slower = units.percent(plan.predicted_step_s / fastest.predicted_step_s - 1)
        is_simpler = len(plan.grids) < len(fastest.grids) or (len(plan.grids) == 1 and _cp(plan) < _cp(fastest))
        kind = "simpler" if is_simpler else "less sensitive to errors of the cost model"
        return f"{kind} than the fastest of {len(candidates)} simulated plans, and {slower} slower: {step}."
    return f"fastest of {len(candidates)} simulated plans at {step}."


def _tie(candidates: Sequence[Ranked], tie_frac: float) -> str:
    """How many of the final plans the chosen one cannot be told from, and the simplest of them where it is simpler."""
    best, *others = (r.plan for r in candidates if r.is_final)
    limit_s = (1 + tie_frac) * best.predicted_step_s
    tied = [plan for plan in others if tie_frac and plan.predicted_step_s <= limit_s]
    if not tied:
        return ""
    simplest = min(tied, key=_complexity)
    simpler = f", one of them simpler: {_where(simplest)}" * (_complexity(simplest) < _complexity(best))
    many = units.counted(len(tied), "other plan")
    return f"Data sheets do not tell it from {many} within {units.percent(tie_frac)}{simpler}."


def _complexity(plan: Plan) -> tuple[int, int, int, int]:
    """What a plan has beyond replicas, worst first: grids, stages, ranks that share samples, tensor parallelism."""
    parallel = plan.module(LLM).parallel
    return len(plan.grids), parallel.pp, parallel.cp, parallel.tp


def _where(plan: Plan) -> str:
    parallel = plan.module(LLM).parallel
    if len(plan.grids) > 1:
        of_grid = (f"{'+'.join(m.module for m in grid)} {grid[-1].parallel.num_processes}" for grid in plan.grids)
        return f"on dedicated ranks: {', '.join(of_grid)}"
    degrees = (
        f"tp {parallel.tp}" + f", cp {parallel.cp}" * (parallel.cp > 1) + f", ep {parallel.ep}" * (parallel.ep > 1)
    )
    if parallel.pp == 1:
        groups = f"{units.counted(parallel.dp, 'group')} of " * (parallel.cp > 1)
        each = parallel.cp if parallel.cp > 1 else parallel.dp
        return f"on {groups}{each} replicas of the whole model, {degrees}"
    return f"on {units.counted(parallel.dp, 'pipeline')} of {parallel.pp} stages, {degrees}"


def _gain(plan: Plan, policy: str) -> str:
    if policy == "arrival":
        return "It runs in arrival order, as its trainer does not balance batches."
    saved_frac = 1.0 - plan.predicted_step_s / plan.baseline_step_s
    if saved_frac < 0.01:
        return "Balanced batches gain nothing over arrival order on this data."
    return (
        f"Balanced batches take {units.percent(saved_frac)} off its step of {units.seconds(plan.baseline_step_s)} "
        "in arrival order."
    )


def _worth(plan: Plan) -> str:
    """Against the best plan of a trainer that gives the whole model one layout and does not look at the data."""
    if math.isnan(plan.uniform_step_s):
        return ""
    speedup = plan.planned_speedup_over_uniform
    than = f"the best uniform plan in arrival order ({units.seconds(plan.uniform_step_s)})"
    if speedup < WORTH_IT:
        return (
            f"Gain below {units.percent(WORTH_IT - 1)}, keep your current setup: {units.ratio(speedup)} the speed "
            f"of {than}."
        )
    return f"{units.ratio(speedup)} the speed of {than}."
