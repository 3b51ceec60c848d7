"""The plan: formula and program to find candidates, simulator with the real scheduler to rank them.

Per number of microbatches the formula values grids for subsets of the modules, and a program picks those that cover
every module once: it nominates the best plan, and proves how good any could be. Good
plans near it and the tuned data-blind plan are added. All are scheduled and simulated on sampled global batches. The
re-rank is not optional: the formula does not see contention for cores, and only the simulator knows what the scheduler
makes of a layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflop import units
from dflop.cost.analytic import SOFTWARE
from dflop.plan.candidates import check_processes, far_apart
from dflop.plan.columns import Columns, Found
from dflop.plan.drafts import charged, draft, fits
from dflop.plan.grid_choice import GridChoice, Grids
from dflop.plan.grid_search import grids_apart, grids_with_llm, whole_depths
from dflop.plan.infeasible import explain
from dflop.plan.program import CUTOFF_RATIO, Optimum, optimum, process_price_s
from dflop.plan.rank import Ranked, arrival_step_s, nominate, rank
from dflop.plan.space import PlanRules, Problem
from dflop.plan.uniform import tuned_uniform
from dflop.plan.verdict import TIE_FRAC, optimality, prefer_simple, proven, reason, unused
from dflop.plan.worst import beyond_text, samples_beyond
from dflop.progress import At, counted, unseen
from dflop.records import Plan, PlanProgram

DRAFTS_PER_COUNT = 10
"""Layouts kept per number of microbatches, of each kind."""
COARSE_RATIO, NUM_REFINED = 1.4, 2
"""Step time changes slowly with the number of microbatches: tried coarsely first, then all around the best two."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What a search came to."""

    plans: tuple[Plan, ...]
    """Simulated, the one to run first."""
    programs: tuple[PlanProgram, ...]
    """What is proven of all plans, by the number of microbatches."""


def plan_problem(
    problem: Problem,
    *,
    top: int = 40,
    policy: str = "balanced",
    progress: Callable[[str], None] | None = None,
    at: At = unseen,
) -> tuple[Plan, ...]:
    """The plans of `optimize`."""
    return optimize(problem, top=top, policy=policy, progress=progress, at=at).plans


def optimize(
    problem: Problem,
    *,
    top: int = 40,
    policy: str = "balanced",
    progress: Callable[[str], None] | None = None,
    at: At = unseen,
) -> Planned:
    """Simulated plans, the one to run first, and what is proven.

    Under the rules of another trainer plans are split, share no parameters and run in arrival order. Where no plan
    holds the largest samples of the data, plans are for the drawn batches, and the first one's reason names the samples
    that go beyond it.

    Args:
        problem: A plan may use fewer processes than there are.
        top: Plans to simulate; those the formula likes best, of all kinds.
        policy: What makes microbatches.
        progress: Receives lines on what happens.
        at: Receives how far the search is.

    Raises:
        InfeasiblePlanError: no layout fits; the message names the binding limit and the nearest fix.
        CostError: a module without a cost table.
    """
    tell = progress or (lambda _: None)
    if problem.space.rules is not None:
        space = replace(problem.space, share_ranks=(False,), shard_parameters=(False,))
        problem, policy = replace(problem, space=space), "arrival"
    if True not in problem.space.share_ranks:
        check_processes([s.module for s in problem.specs], problem.cluster.num_processes)
    ranked, programs = _ranked(problem, top, policy, tell, at)
    beyond = ""
    if not ranked and problem.worst_samples:
        tell("no plan fits the largest samples of the data: planning for the sampled batches alone")
        ranked, programs = _ranked(replace(problem, worst_samples=()), top, policy, tell, at)
        beyond = beyond_text(problem, samples_beyond(problem, ranked[0].plan)) if ranked else ""
    if not ranked:
        raise explain(problem)
    best = ranked[0].plan
    for line in _extrapolated(best, problem):
        tell(line)
    tables = (problem.cost.table(m.module, m.modes[-1]) for m in best.modules)
    tie_frac = TIE_FRAC if any(table.software == SOFTWARE for table in tables) else 0.0
    reasons = [reason(r, ranked, policy, tie_frac) for r in ranked]
    used = [unused(r.plan, problem.cluster.num_processes) for r in ranked]
    first = (reasons[0], optimality(best, programs), f"It {used[0]}." * bool(used[0]), beyond)
    others = ("; ".join(filter(None, pair)) for pair in zip(reasons[1:], used[1:], strict=True))
    reasons = [" ".join(filter(None, first)), *others]
    plans = (
        replace(r.plan, candidate_rank=place, reason=why)
        for place, (r, why) in enumerate(zip(ranked, reasons, strict=True))
    )
    return Planned(tuple(plans), tuple(replace(p, run_id=problem.run_id, plan_id=best.plan_id) for p in programs))


def _ranked(
    problem: Problem, top: int, policy: str, tell: Callable[[str], None], at: At
) -> tuple[list[Ranked], list[PlanProgram]]:
    """Simulated plans that fit in memory, the uniform data-blind plan among them, none if none fits; what is proven."""
    drafts, programs = _drafts(problem, tell, at)
    uniform = tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))
    nominees = [charged(problem, plan) for plan in nominate(drafts, top)]
    space = problem.space
    if uniform is not None and True in space.share_ranks and False in space.shard_parameters:
        nominees = list({plan.plan_id: plan for plan in (*nominees, uniform)}.values())
    ranked = prefer_simple(rank(problem, nominees, policy, at))
    held = " together with the largest samples of the data" * bool(problem.worst_samples)
    tell(f"simulated {len(nominees)} plans on {len(problem.batches)} global batches, {len(ranked)} fit in memory{held}")
    uniform_s = float("nan") if uniform is None else arrival_step_s(problem, uniform)
    return [replace(r, plan=replace(r.plan, uniform_step_s=uniform_s)) for r in ranked], programs


def _drafts(problem: Problem, tell: Callable[[str], None], at: At) -> tuple[list[Plan], list[PlanProgram]]:
    """The formula's favourites for numbers of microbatches far apart, then for those beside the best of these."""
    counts, cluster = problem.microbatch_choices, problem.cluster
    # Processes that share cores are not in the formula: a plan with few of them may be far better than it says.
    ratio = CUTOFF_RATIO if cluster.max_concurrency >= cluster.num_processes else math.inf
    found, proofs = _visit(problem, far_apart(counts, COARSE_RATIO), math.inf, ratio, tell, at)
    best = sorted((min(d.formula_step_s for d in drafts), m) for m, drafts in found.items() if drafts)[:NUM_REFINED]
    visited, more = sorted(found), set[int]()
    for _, m in best:
        place = visited.index(m)
        below, above = visited[max(place - 1, 0)], visited[min(place + 1, len(visited) - 1)]
        more |= {n for n in counts if below < n < above and n not in found}
    if more:
        others, other_proofs = _visit(problem, sorted(more), best[0][0], ratio, tell, at)
        found, proofs = found | others, proofs + other_proofs
    if problem.space.rules is not None:
        proofs = []  # of parts of what the rules allow
    elif rest := [m for m in counts if m not in found]:
        known_s = min((o.program.objective_s for o in proofs), default=math.inf)
        others, other_proofs = _visit(problem, rest, known_s, 1.0, lambda _: None, at)
        found |= {m: [d for d in drafts if d.formula_step_s < known_s] for m, drafts in others.items()}
        proofs += other_proofs
    proofs.sort(key=lambda o: o.program.num_microbatches)
    programs = [o.program for o in proofs]
    k = min(range(len(proofs)), key=lambda k: programs[k].objective_s, default=0)
    if proofs and proofs[k].found:
        programs[k] = replace(programs[k], process_price_s=process_price_s(proofs[k]))
    for line in proven(programs):
        tell(line)
    return [plan for m in sorted(found) for plan in found[m]], programs


def _visit(
    problem: Problem, counts: Sequence[int], known_s: float, ratio: float, tell: Callable[[str], None], at: At
) -> tuple[dict[int, list[Plan]], list[Optimum]]:
    """Drafts per number of microbatches, and what is proven.

    `known_s` is the best formula value so far, and drafts are within `ratio` of the best.
    """
    of_depths, middle = {m: whole_depths(problem, m) for m in counts}, len(counts) // 2
    # The best are likely in the middle, a look at which cuts off others, and where the least is small.
    first = grids_with_llm(of_depths[counts[middle]], 1) if math.isinf(known_s) else []
    known_s = min([known_s, *(float(of.alone_s.min()) for of in first)])
    least_s = {m: min((depth[0] for depth in of_depths[m]), default=math.inf) for m in counts}
    ordered = sorted(counts, key=lambda m: (least_s[m], abs(counts.index(m) - middle)))
    whole: dict[int, list[Grids]] = {}
    for m in counted(ordered, "searching layouts, by the number of microbatches", at):
        whole[m] = grids_with_llm(of_depths[m], DRAFTS_PER_COUNT, known_s * ratio)
        known_s = min([known_s, *(float(of.alone_s.min()) for of in whole[m])])
    ordered.sort(key=lambda m: min((float(of.alone_s.min()) for of in whole[m]), default=math.inf))
    proofs = []
    for m in counted(ordered, "covering modules, by the number of microbatches", at):
        grids = [*whole[m], *grids_apart(problem, m, known_s * ratio)]
        for columns in _parts(problem, m, grids):
            # Rules cut a space into many parts: only one that may hold the best plan of all is worth a program.
            looked = ratio if problem.space.rules is None else 1.0
            proofs.append(optimum(columns, m, known_s, DRAFTS_PER_COUNT, ratio=looked))
            known_s = min(known_s, proofs[-1].program.objective_s)
    found = {m: list[Plan]() for m in counts}
    for each in proofs:
        near = [(value_s, cover) for value_s, cover in each.found if value_s <= known_s * ratio]
        found[each.program.num_microbatches] += _cover_drafts(problem, each, near)
    for m, drafts in found.items():
        if problem.space.rules is not None:
            alike = {plan.plan_id: plan for plan in drafts}
            drafts[:] = sorted(alike.values(), key=lambda plan: (plan.formula_step_s, plan.plan_id))[:DRAFTS_PER_COUNT]
        kept = f"{units.counted(len(drafts), 'feasible layout')} near the best"
        tell(f"{units.counted(m, 'microbatch', 'microbatches')}: {kept}")
    return found, proofs


def _parts(problem: Problem, num_microbatches: int, grids: Sequence[Grids]) -> list[Columns | None]:
    """Columns of grids; under rules one per part of what they allow."""
    names = [spec.module for spec in problem.specs]
    columns, rules = Columns.of(names, num_microbatches, problem.cluster.num_processes, grids), problem.space.rules
    if rules is None or columns is None:
        return [columns]
    num_samples = problem.global_batch_size // num_microbatches
    return [columns.select(rows) for rows in rules.parts(columns, num_samples)]


def _cover_drafts(problem: Problem, proof: Optimum, found: Sequence[Found]) -> list[Plan]:
    """Under rules layers are bent to what they allow, and may not fit then."""
    m, rules, drafts = proof.program.num_microbatches, problem.space.rules, list[Plan]()
    for value_s, cover in found:
        assert proof.columns is not None, "covers are of columns"
        grids = proof.columns.choices(cover)
        if rules is not None:
            grids = [_bent(rules, grid) for grid in grids]
        drafts.append(draft(problem, m, grids, value_s, with_caps=False, per_microbatch=rules is None))
    if rules is not None:
        return [plan for plan in drafts if fits(problem, plan)]
    for plan in drafts:
        assert fits(problem, plan), f"plan {plan.plan_id} does not fit although its formula predicted so"
    return drafts


def _bent(rules: PlanRules, grid: GridChoice) -> GridChoice:
    """A grid with the nearest layers that rules accept."""
    layers = {name: rules.nearest_layers(own) for name, own in grid.layers.items()}
    again = layers if grid.num_recomputed else {name: (0,) * len(own) for name, own in layers.items()}
    return replace(grid, layers=layers, recomputed=again)


def _extrapolated(plan: Plan, problem: Problem) -> list[str]:
    """A line per module whose average microbatch has more tokens than any probe had."""
    found = []
    for m in plan.modules:
        load = problem.loads[m.module].typical([plan.num_microbatches * m.parallel.dp])
        tokens = round(float(load[1, 0]) / m.parallel.cp)
        probed = problem.cost.table(m.module, m.modes[-1]).max_tokens
        if probed and tokens > probed:
            found.append(
                f"`{m.module}`: an average microbatch has {tokens} tokens{' per rank' * (m.parallel.cp > 1)}, "
                f"the largest probe had {probed}; its times are extrapolated"
            )
    return found
