"""Every plan of one grid that fits, one by one."""

from __future__ import annotations

from dflop.plan.drafts import draft, fits
from dflop.plan.grid_search import _order, grids_with_llm, whole_depths
from dflop.plan.space import Problem
from dflop.records import Plan


def inline_choices(problem: Problem, num_microbatches: int, top: int | None = 16) -> list[tuple[float, Plan]]:
    """Drafts of one grid that fit in memory with their formula value, best first, fewer processes first among equals.

    Args:
        problem: What to plan for.
        num_microbatches: Per step.
        top: Drafts to return, of one mode and pp no more than two; None: all.
    """
    found = grids_with_llm(whole_depths(problem, num_microbatches), top)
    ones = sorted((grids.select(slice(k, k + 1)) for grids in found for k in range(len(grids))), key=_order)
    drafts: list[tuple[float, Plan]] = []
    for before, one in zip([None, *ones], ones, strict=False):
        if before is not None and _order(before) == _order(one) and before.choice(0) == one.choice(0):
            continue
        value_s = float(one.alone_s[0])
        plan = draft(problem, num_microbatches, [one.choice(0)], value_s, with_caps=False, per_microbatch=True)
        assert fits(problem, plan), f"plan {plan.plan_id} does not fit although its formula predicted so"
        drafts.append((value_s, plan))
    return drafts
