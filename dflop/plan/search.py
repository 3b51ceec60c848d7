"""The plan: formula to find candidates, simulator with the real scheduler to rank them.

Per number of microbatches the formula nominates layouts with ranks of their own per module and inline chains; the tuned
data-blind plan stands beside them. All are scheduled and simulated on sampled global batches. The re-rank is not
optional: the formula does not see contention for cores, and only the simulator knows what the scheduler makes of a
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dflop.cost.model import CostModel
from dflop.plan.baselines.uniform import tuned_uniform
from dflop.plan.candidates import check_processes
from dflop.plan.drafts import fits, split_draft
from dflop.plan.enumerate import best_choices
from dflop.plan.formula import FormulaTable, formula_table
from dflop.plan.infeasible import explain
from dflop.plan.inline import inline_choices
from dflop.plan.rank import Ranked, arrival_step_s, nominate, rank
from dflop.plan.space import PlanRules, Problem, SearchSpace
from dflop.plan.verdict import prefer_simple, reason
from dflop.plan.worst import beyond_text, samples_beyond
from dflop.records import ClusterSpec, ModuleSpec, Plan, SampleShape
from dflop.schedule.policies import QUICK, Effort

DRAFTS_PER_COUNT = 15
"""Layouts kept per number of microbatches, of each kind."""
COARSE_RATIO, NUM_REFINED = 1.4, 2
"""Step time changes slowly with the number of microbatches: tried coarsely first, then all around the best two."""


def make_plans(
    *,
    run_id: str,
    specs: Sequence[ModuleSpec],
    cluster: ClusterSpec,
    cost: CostModel,
    batches: Sequence[Sequence[SampleShape]],
    global_batch_size: int,
    snapshot_seq: int,
    space: SearchSpace | None = None,
    top: int = 40,
    effort: Effort = QUICK,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, ...]:
    """Simulated plans, the one to run first.

    Args:
        run_id: Copied into the plans.
        specs: Encoders first, `llm` last.
        cluster: Processes, memory, cores. A plan may use fewer processes than there are.
        cost: Tables for every module. The search looks at microbatches far larger than any probe, and what it would
            refuse to predict it could not compare: it extrapolates, and says so of the best plan.
        batches: Sampled global batches, at least one.
        global_batch_size: Samples per step.
        snapshot_seq: Copied into the plans.
        space: What may be chosen.
        top: Plans to simulate; those the formula likes best, of all kinds.
        effort: The scheduler's budget in the last round of ranking.
        progress: Told what happens, one line each.

    Raises:
        InfeasiblePlanError: no layout fits; the message names the binding limit and the nearest fix.
        CostError: a module without a cost table.
    """
    problem = Problem(
        run_id, tuple(specs), cluster, cost.extrapolating(), tuple(batches), global_batch_size, snapshot_seq,
        space or SearchSpace(),
    )  # fmt: skip
    return plan_problem(problem, top=top, effort=effort, progress=progress)


def plan_problem(
    problem: Problem,
    *,
    top: int = 40,
    effort: Effort = QUICK,
    policy: str = "balanced",
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, ...]:
    """As `make_plans`, for a scheduling policy of one's own, too.

    Under the rules of another trainer plans are split and run in arrival order. Where no plan holds the largest samples
    of the data, plans are for the drawn batches, and the first one's reason names the samples that go beyond it.
    """
    tell = progress or (lambda _: None)
    if problem.space.rules is not None:
        problem, policy = replace(problem, space=replace(problem.space, layouts=("split",))), "arrival"
    if problem.space.layouts == ("split",):
        check_processes([s.module for s in problem.specs], problem.cluster.num_processes)
    ranked, beyond = _ranked(problem, top, effort, policy, tell), ""
    if not ranked and problem.worst_samples:
        tell("no plan holds the largest samples of the data: planning for the drawn batches alone")
        ranked = _ranked(replace(problem, worst_samples=()), top, effort, policy, tell)
        beyond = beyond_text(problem, samples_beyond(problem, ranked[0].plan)) if ranked else ""
    if not ranked:
        raise explain(problem)
    for line in _extrapolated(ranked[0].plan, problem):
        tell(line)
    reasons = [reason(r, ranked, policy) for r in ranked]
    reasons[0] = f"{reasons[0]} {beyond}".rstrip()
    return tuple(
        replace(r.plan, candidate_rank=place, reason=why)
        for place, (r, why) in enumerate(zip(ranked, reasons, strict=True))
    )


def _ranked(problem: Problem, top: int, effort: Effort, policy: str, tell: Callable[[str], None]) -> list[Ranked]:
    """Simulated plans that fit in memory, the uniform data-blind plan among them; empty if none fits."""
    drafts = _drafts(problem, tell)
    uniform = tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))
    nominees = nominate(drafts, top)
    if uniform is not None and "inline" in problem.space.layouts:
        nominees = list({plan.plan_id: plan for plan in (*nominees, uniform)}.values())
    ranked = prefer_simple(rank(problem, nominees, effort, policy))
    held = " with the largest samples of the data" * bool(problem.worst_samples)
    tell(f"simulated {len(nominees)} plans on {len(problem.batches)} global batches, {len(ranked)} fit in memory{held}")
    uniform_s = float("nan") if uniform is None else arrival_step_s(problem, uniform)
    return [replace(r, plan=replace(r.plan, uniform_step_s=uniform_s)) for r in ranked]


def _drafts(problem: Problem, tell: Callable[[str], None]) -> list[Plan]:
    """The formula's favourites for numbers of microbatches far apart, then for those beside the best of these."""
    counts = problem.microbatch_choices
    found = {m: _drafts_of(problem, m, tell) for m in _far_apart(counts)}
    best = sorted((min(d.formula_step_s for d in drafts), m) for m, drafts in found.items() if drafts)[:NUM_REFINED]
    visited = sorted(found)
    for _, m in best:
        at = visited.index(m)
        below, above = visited[max(at - 1, 0)], visited[min(at + 1, len(visited) - 1)]
        found |= {n: _drafts_of(problem, n, tell) for n in counts if below < n < above and n not in found}
    return [draft for m in sorted(found) for draft in found[m]]


def _drafts_of(problem: Problem, num_microbatches: int, tell: Callable[[str], None]) -> list[Plan]:
    found: list[Plan] = []
    if "split" in problem.space.layouts and len(problem.specs) <= problem.cluster.num_processes:
        table = formula_table(problem, num_microbatches)
        if problem.space.rules is not None:
            found += _drafts_under_rules(problem, table, problem.space.rules)
        else:
            found += [
                split_draft(problem, num_microbatches, table.layout(choice), value)
                for value, choice in best_choices(table, DRAFTS_PER_COUNT)
            ]
    if "inline" in problem.space.layouts:
        found += [plan for _, plan in inline_choices(problem, num_microbatches, top=DRAFTS_PER_COUNT)]
    kept = f"{len(found)} layouts kept" if found else "nothing fits"
    tell(f"{num_microbatches} microbatches: {kept}")
    return found


def _drafts_under_rules(problem: Problem, table: FormulaTable, rules: PlanRules) -> list[Plan]:
    """The best drafts that another trainer accepts; splits of layers are bent to what it can say."""
    m, found = table.num_microbatches, []
    for part in rules.parts([t.candidates for t in table.modules], problem.global_batch_size // m):
        small = replace(table, modules=tuple(t.select(i) for t, i in zip(table.modules, part, strict=True)))
        for value, choice in best_choices(small, DRAFTS_PER_COUNT):
            layout = {
                name: replace(c, layers_per_stage=rules.nearest_layers(c.layers_per_stage))
                for name, c in small.layout(choice).items()
            }
            found.append(split_draft(problem, m, layout, value))
    fitting = {plan.plan_id: plan for plan in found if fits(problem, plan)}
    return sorted(fitting.values(), key=lambda plan: (plan.formula_step_s, plan.plan_id))[:DRAFTS_PER_COUNT]


def _far_apart(counts: Sequence[int]) -> list[int]:
    """The first count and those at least `COARSE_RATIO` times the one before, the last one among them."""
    kept = list(counts[:1])
    for m in counts[1:]:
        if m >= COARSE_RATIO * kept[-1] or m == counts[-1]:
            kept.append(m)
    return kept


def _extrapolated(plan: Plan, problem: Problem) -> list[str]:
    """A line per module whose average microbatch has more tokens than any probe had."""
    found = []
    for m in plan.modules:
        tokens = round(float(problem.loads[m.module].typical([plan.num_microbatches * m.parallel.dp])[1, 0]))
        probed = problem.cost.table(m.module, m.parallel.tp, m.recompute).max_tokens
        if probed and tokens > probed:
            found.append(
                f"`{m.module}`: an average microbatch has {tokens} tokens, the largest probe had {probed}; "
                "its times are extrapolated"
            )
    return found
