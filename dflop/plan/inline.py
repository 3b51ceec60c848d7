"""Inline plans: one chain of stages on one grid, encoder layers before those of the LLM, cut by predicted time.

With one stage this is plain data parallelism. The formula has one pipeline only:

    J = mean_s [ fill[s] + (M - 1) * tau[s] ] + sync

with tau the slowest stage on an average microbatch and fill the time one microbatch takes through all stages, each
charged with the more of an average microbatch and the heaviest single sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from dflop.plan.candidates import NUM_SHARD_CHOICES
from dflop.plan.chain import Chain
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import Problem
from dflop.records import Plan

MAX_ALIKE = 2
"""Choices of one tp, cp and pp: a few replicas less are all but the same plan, only slower."""
Degrees = tuple[int, int, int]
"""(tp, cp, pp)."""


def inline_choices(
    problem: Problem, num_microbatches: int, top: int | None = 16, limit_s: float = math.inf
) -> list[tuple[float, Plan]]:
    """Inline drafts that fit in memory with their formula value, best first, fewer processes first among equals.

    How many tokens memory holds is not looked for yet (`drafts.charged`).

    Every tp, cp, pp and dp on at most all processes; as many layers recompute as it takes to fit, or all of them, and
    parameters are shared where that saves some of it. Layers are cut by time; where the most replicas fit so only with
    layers that run again, or not at all, by the time with such layers, too.

    Args:
        problem: What to plan for.
        num_microbatches: Per step.
        top: Drafts to return, of one tp, cp and pp no more than two; None: all.
        limit_s: Formula value of what is worth a look.
    """
    kept: list[GridChoice] = []
    tight: list[tuple[Chain, GridChoice]] = []
    tps = set.intersection(*(set(problem.tps(spec)) for spec in problem.specs))
    chains = [Chain.of(problem, tp, num_microbatches, cp) for tp in sorted(tps) for cp in problem.cps(tp)]
    grids = [(chain.at_least_s(pp), chain, pp) for chain in chains for pp in range(1, chain.max_pp + 1)]
    for least_s, chain, pp in sorted(grids, key=lambda grid: grid[0]):
        if least_s > limit_s or (top is not None and len(kept) == top and least_s > kept[-1].formula_s):
            break
        without: set[int] = set()  # groups that fit as they are: saving more memory than that would be slower
        fits_so = False
        for kind in range(NUM_SHARD_CHOICES):
            fitting, best = chain.choices(pp, kind, without=without, limit_s=limit_s)
            kept = _kept([*kept, *fitting], top)
            if best is not None and (fitting or not fits_so):
                tight.append((chain, best))
            fits_so = fits_so or bool(fitting)
            without |= {c.parallel.dp for c in fitting if not c.num_recomputed}
    most = {_degrees(c): c for _, c in sorted(tight, key=lambda pair: pair[1].parameter_shards)}
    held: dict[Degrees, GridChoice | None] = {}
    # Cut by time alone they would be at least this fast, which decides whether it is worth looking for other cuts.
    for chain, choice in sorted(tight, key=lambda pair: _order(pair[1])):
        if top is not None and len(kept) == top and choice.formula_s > kept[-1].formula_s:
            break
        key = _degrees(choice)
        if key not in held:  # where it does not fit with most of it shared out, it does not with less
            held[key] = chain.within_memory(most[key])
        within = held[key]
        if within is not None and choice is not most[key]:
            within = chain.within_memory(choice)
        if within is not None and within.formula_s <= limit_s and within not in kept:
            kept = _kept([*kept, within], top)
    return [(c.formula_s, _draft(problem, num_microbatches, c)) for c in kept]


def _kept(choices: Sequence[GridChoice], top: int | None) -> list[GridChoice]:
    """In order; with a limit, the best of all, of each tp, cp, pp and way to save memory at most `MAX_ALIKE`."""
    ordered = sorted(choices, key=_order)
    if top is None:
        return ordered
    seen: Counter[tuple[Degrees, bool, bool]] = Counter()
    kept = []
    for choice in ordered:
        kind = (_degrees(choice), choice.parameter_shards > 1, choice.recomputed == choice.layers)
        seen[kind] += 1
        if seen[kind] <= MAX_ALIKE:
            kept.append(choice)
    return kept[:top]


def _order(choice: GridChoice) -> tuple[float, int, int, int, int, int]:
    p = choice.parallel
    return choice.formula_s, p.num_processes, p.cp, p.tp, p.pp, choice.num_recomputed


def _degrees(choice: GridChoice) -> Degrees:
    return choice.parallel.tp, choice.parallel.cp, choice.parallel.pp


def _draft(problem: Problem, num_microbatches: int, choice: GridChoice) -> Plan:
    plan = draft(problem, num_microbatches, [choice], choice.formula_s, with_caps=False, per_microbatch=True)
    assert fits(problem, plan), f"inline plan {plan.plan_id} does not fit although its formula predicted so"
    return plan
