"""The best plan of one number of microbatches, as a mixed-integer program of columns that cover every module once.

Whether modules share ranks is for the program to decide. One binary per column that a plan better than the best known
can hold (`columns.py`), an epigraph variable for every maximum of the formula: exact. HiGHS stops at a number of nodes,
never at a time, so no plan hangs on how busy a machine is; a stop leaves the best plan known, and says how much better
one could be. Ties go to fewer processes, then to smaller degrees. What is proven is proven of the formula and of the
cuts that `chain.py` gives each grid: simulated steps of two plans may be the other way round.

cvxpy takes 0.7 s to import: only who solves a program imports it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.plan.columns import MAX_COMBINED, Columns, Cover, Found, combined
from dflop.records import PlanProgram

MAX_NODES = 2_000
"""Most nodes of one program."""
CUTOFF_RATIO = 1.15
"""Times the best known value of the formula: plans beyond it are not looked for."""
GAP = 1e-9
"""Relative: what is nearer to the best than this is its equal."""
OPTIMAL, NODE_LIMIT, BOUNDED, INFEASIBLE = "optimal", "node limit", "bounded", "infeasible"
"""Proven; stopped; nothing below the cutoff; nothing fits."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """What came out of the columns of one number of microbatches."""

    columns: Columns | None
    found: list[Found]
    """Good covers up to the cutoff, best first."""
    program: PlanProgram


def optimum(
    columns: Columns | None,
    num_microbatches: int,
    known_s: float,
    top: int,
    *,
    ratio: float = CUTOFF_RATIO,
    max_nodes: int = MAX_NODES,
) -> Optimum:
    """The best covers of columns and what is proven.

    Args:
        columns: All that plans up to the cutoff may hold; None: there are none.
        num_microbatches: That they are of.
        known_s: Formula value of the best plan known otherwise; infinite: none.
        top: Covers of each way to share out the modules.
        ratio: Of the best known value, what is looked at.
        max_nodes: Of the program.
    """
    limit_s, rows, status = known_s * ratio, np.zeros(0, dtype=np.int64), BOUNDED
    found = [] if columns is None else columns.incumbents(top)
    incumbent_s = min([math.inf, *(value_s for value_s, _ in found[:1])])
    bound_s = limit_s if columns is None else min(float(columns.bounds_s.min()), limit_s)
    if math.isinf(bound_s):
        status = INFEASIBLE
    elif columns is not None and len(rows := columns.near(near_s := min(incumbent_s, limit_s))):
        scale_s = max(bound_s, 1e-12)
        model = _Model(left := columns.select(rows), scale_s)
        status = model.minimize(model.step, max_nodes) if left.parts else INFEASIBLE
        proven_s = model.bound * scale_s if left.parts else math.inf
        bound_s = max(bound_s, min(proven_s, near_s if math.isfinite(near_s) else math.inf))
        if status != NODE_LIMIT and proven_s > limit_s * (1 + GAP):
            status = BOUNDED
        if status in (OPTIMAL, NODE_LIMIT) and (cover := model.cover(rows)):
            best = _first_of_equals(columns, cover) if status == OPTIMAL else (_value_s(columns, cover), cover)
            assert math.isfinite(best[0]), f"the solver's cover {cover} is not feasible ({status})"
            found = sorted([best, *(each for each in found if each[1] != best[1])], key=lambda each: each[0])
    found = [each for each in found if each[0] <= limit_s]
    objective_s = min([math.inf, *(value_s for value_s, _ in found[:1])])
    bound_s = min(bound_s, objective_s)
    program = PlanProgram(
        run_id="",
        plan_id="",
        num_microbatches=num_microbatches,
        num_columns=0 if columns is None else len(columns),
        num_columns_left=len(rows),
        incumbent_s=incumbent_s,
        objective_s=objective_s,
        bound_s=bound_s,
        gap_frac=1.0 - bound_s / objective_s if math.isfinite(objective_s) else 0.0,
        status=status,
        process_price_s=math.nan,
    )
    return Optimum(columns, found, program)


def process_price_s(best: Optimum) -> float:
    """Seconds of the formula that one process more would save in the relaxed program.

    Right within a half for a node more, too hopeful beyond.
    """
    columns, objective_s = best.columns, best.program.objective_s
    assert columns is not None, "nothing was found"
    model = _Model(columns, objective_s, is_relaxed=True)  # whole: bounds leave out what is too large today
    model.minimize(model.step)
    return float(model.room.dual_value) * objective_s / columns.num_processes


def _value_s(columns: Columns, cover: Cover) -> float:
    return float(columns.values_s(np.array([cover]))[0])


def _first_of_equals(columns: Columns, cover: Cover) -> Found:
    """The cover with the fewest processes, then the smallest degrees, among those as good as the best one."""
    value_s = _value_s(columns, cover)
    near = columns.near(value_s * (1 + GAP))
    found = [(value_s, cover)]
    for parts in columns.parts:
        rows = [near[columns.subset[near] == part] for part in parts]
        width = int(MAX_COMBINED ** (1 / len(parts)))
        order = [np.lexsort([*columns.degrees[::-1, of], columns.processes[of]])[:width] for of in rows]
        covers = combined([of[first] for of, first in zip(rows, order, strict=True)])
        equal = covers[columns.values_s(covers) <= value_s * (1 + GAP)] if len(covers) else covers
        found += columns.best(equal, 1)
    return min(found, key=lambda each: columns.order((value_s, each[1])))


class _Model:
    """The program of columns, `scale_s` is what it takes as one."""

    def __init__(self, columns: Columns, scale_s: float, *, is_relaxed: bool = False) -> None:
        import cvxpy as cp

        c, with_llm, num_scenarios = columns, columns.with_llm, len(columns.tau_s)
        self.bound = -math.inf
        """Bound of the last criterion."""
        self.x: Any = cp.Variable(len(c), nonneg=is_relaxed, boolean=not is_relaxed)
        tau: Any = cp.Variable(num_scenarios, nonneg=True)
        fill: Any = cp.Variable(num_scenarios, nonneg=True)
        sync: Any = cp.Variable(nonneg=True)
        self.step = (tau.sum() + fill.sum()) / num_scenarios + sync
        self.step += (c.fill_s.mean(axis=0) * with_llm / scale_s) @ self.x
        self.room: Any = (c.processes / c.num_processes) @ self.x <= 1
        self.limits = [self.room, c.holds.astype(float) @ self.x == 1]
        between_s, deepest = (c.num_microbatches - 1) / scale_s * c.tau_s, float(c.llm_pp.max(initial=0))
        for held in c.holds:  # of columns with a module one is picked, so sums are its terms
            self.limits += [(between_s * held) @ self.x <= tau, (c.sync_s / scale_s * held) @ self.x <= sync]
            if (held & ~with_llm).any():
                self.limits.append((c.fill_s / scale_s * (held & ~with_llm)) @ self.x <= fill)
                depth = c.llm_pp - np.minimum(c.max_llm_pp, deepest) * held
                self.limits.append(depth @ self.x <= 0)

    def minimize(self, criterion: Any, max_nodes: int = MAX_NODES) -> str:
        """Status of the program."""
        import cvxpy as cp

        problem: Any = cp.Problem(cp.Minimize(criterion), self.limits)
        tolerances = ("mip_rel_gap", "mip_abs_gap", "mip_feasibility_tolerance", "primal_feasibility_tolerance")
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a stop is no optimum
                problem.solve(solver=cp.HIGHS, threads=1, mip_max_nodes=max_nodes, **dict.fromkeys(tolerances, GAP))
        except cp.SolverError:  # stopped before any solution
            return NODE_LIMIT
        if problem.status == "infeasible":
            self.bound = math.inf
            return INFEASIBLE
        self.bound = float(problem.solver_stats.extra_stats.mip_dual_bound)
        return OPTIMAL if problem.status == "optimal" else NODE_LIMIT

    def cover(self, rows: Any) -> Cover:
        """What is picked; empty without a solution."""
        x = self.x.value
        if x is None or not np.isfinite(x).all():
            return ()
        return tuple(rows[np.flatnonzero(x > 0.5)].tolist())
