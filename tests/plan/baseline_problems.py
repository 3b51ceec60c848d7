"""A small problem for the planners we compare with."""

from __future__ import annotations

from typing import Any

from dflop.plan.space import Problem
from dflop.records import Plan
from tests.plan.problems import make_problem


def baseline_problem(*encoders: str, **changes: Any) -> Problem:
    """Eight processes, tp 1 and 2, pipelines of up to four stages for every module."""
    return make_problem(*(encoders or ("vision",)), **({"num_processes": 8, "tps": (1, 2), "max_pp": 4} | changes))


def tiles_the_cluster(problem: Problem, plan: Plan) -> bool:
    """Whether every rank belongs to one module, or to the one chain of them."""
    ranks = [
        rank
        for m in (plan.modules[-1:] if plan.is_inline else plan.modules)
        for rank in range(m.first_rank, m.first_rank + m.parallel.num_processes)
    ]
    return sorted(ranks) == list(range(problem.cluster.num_processes))
