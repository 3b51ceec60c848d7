"""The best plan with processes of their own per module, as a mixed-integer program of one number of microbatches.

One binary per candidate that a plan better than the best known can hold (`columns.py`), an epigraph variable for every
maximum of the formula: exact. HiGHS stops at a number of nodes, never at a time, so no plan hangs on how busy a machine
is; a stop leaves the best plan known, and says how much better one could be. Ties go to fewer processes, then to
smaller degrees. What is proven is proven of the formula: simulated steps of two plans may be the other way round.

cvxpy takes 0.7 s to import: only who solves a program imports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflop.plan.columns import MAX_COMBINED, Choice, Columns, Found, best_of, combined
from dflop.plan.formula import FormulaTable
from dflop.records import PlanProgram
from dflop.schedule.items import Ints

MAX_NODES = 2_000
"""Of one program."""
CUTOFF_RATIO = 1.35
"""Times the best known value of the formula: plans beyond it are not looked for."""
GAP = 1e-9
"""Relative: what is nearer to the best than this is its equal."""
OPTIMAL, NODE_LIMIT, BOUNDED, INFEASIBLE = "optimal", "node limit", "bounded", "infeasible"
"""Proven; stopped; nothing below the cutoff; nothing fits."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """What came out of one table."""

    table: FormulaTable
    found: list[Found]
    """The best, and good ones behind it, up to the cutoff; the best of all tables in any case."""
    program: PlanProgram


def optima(
    tables: Sequence[FormulaTable],
    known_s: float,
    top: int,
    *,
    ratio: float = CUTOFF_RATIO,
    max_nodes: int = MAX_NODES,
) -> list[Optimum]:
    """Per table, in their order, the best choice and what is proven of it.

    Tables are visited in the order of their bounds, and solved where the bound is within the cutoff.

    Args:
        tables: Of numbers of microbatches, or parts of one.
        known_s: Formula value of the best plan known otherwise, of a chain of stages say; infinite: none.
        top: Choices per table.
        ratio: Of the best known value, what is looked at.
        max_nodes: Of each program.
    """
    columns = [Columns.of(table) for table in tables]
    incumbents = [each.incumbents(top) for each in columns]
    known_s = min([known_s, *(found[0][0] for found in incumbents if found)])
    optimum: dict[int, Optimum] = {}
    for k in sorted(range(len(tables)), key=lambda k: (columns[k].least_s, k)):
        optimum[k] = _optimum(columns[k], incumbents[k], known_s * ratio, max_nodes)
        known_s = min(known_s, optimum[k].program.objective_s)
    best_s = min((o.program.objective_s for o in optimum.values()), default=math.inf)
    near_s = max(known_s * max(ratio, CUTOFF_RATIO), best_s)
    return [replace(o, found=[f for f in o.found[:top] if f[0] <= near_s]) for _, o in sorted(optimum.items())]


def good_choice(table: FormulaTable) -> Found | None:
    """A choice that is feasible, not the best one; None when there is none, which takes a program to know at times."""
    columns = Columns.of(table)
    found = columns.incumbents(1) or _optimum(columns, [], math.inf, MAX_NODES).found
    return found[0] if found else None


def process_price_s(best: Optimum) -> float:
    """Seconds of the formula that one process more would save in the relaxed program.

    Right within a half for a node more, too hopeful beyond.
    """
    objective_s = best.program.objective_s
    model = _Model(best.table, objective_s, is_relaxed=True)  # whole: bounds leave out what is too large today
    model.minimize(model.step)
    return float(model.room.dual_value) * objective_s / best.table.num_processes


def _optimum(columns: Columns, incumbents: list[Found], limit_s: float, max_nodes: int) -> Optimum:
    table, found = columns.table, incumbents
    incumbent_s = found[0][0] if found else math.inf
    rows = columns.under(min(incumbent_s, limit_s))
    bound_s, status = columns.least_s, BOUNDED if math.isfinite(columns.least_s) else INFEASIBLE
    if all(map(len, rows)):
        model = _Model(table.select(rows), columns.least_s)
        status = model.minimize(model.step, max_nodes)
        bound_s = max(bound_s, min(model.bound * columns.least_s, limit_s))  # others were left out beyond the limit
        if status != NODE_LIMIT and model.bound * columns.least_s > limit_s * (1 + GAP):
            status = BOUNDED
        if (choice := model.choice(rows)) is not None:
            assert table.feasible(choice), f"the solver's choice {choice} is not feasible ({status})"
            found = best_of(table, np.array([choice, *(c for _, c in found)]), len(found) + 1)
        if status == OPTIMAL:
            best = _first_of_equals(columns, found[0], max_nodes)
            found = [best, *(each for each in found if each[1] != best[1])]
    objective_s = found[0][0] if found else math.inf
    bound_s = min(bound_s, objective_s)
    program = PlanProgram(
        run_id="",
        plan_id="",
        num_microbatches=table.num_microbatches,
        num_columns=sum(len(m.candidates) for m in table.modules),
        num_columns_left=sum(map(len, rows)),
        incumbent_s=incumbent_s,
        objective_s=objective_s,
        bound_s=bound_s,
        gap_frac=1.0 - bound_s / objective_s if math.isfinite(bound_s) else 0.0,
        status=status,
        process_price_s=math.nan,
    )
    return Optimum(table, found, program)


def _first_of_equals(columns: Columns, best: Found, max_nodes: int) -> Found:
    """Of all choices as good as the best one, that with the fewest processes and then the smallest degrees."""
    table, rows = columns.table, columns.under(best[0] * (1 + GAP))
    if math.prod(map(len, rows)) <= MAX_COMBINED:
        return best_of(table, combined(table, rows), 1)[0]
    rows = [of[np.lexsort(m.candidates.content[of].T[::-1])] for m, of in zip(table.modules, rows, strict=True)]
    model = _Model(table.select(rows), best[0])
    model.limits.append(model.step <= 1 + GAP)
    for criterion in (model.processes, *(np.arange(x.size) @ x for x in model.picks)):
        if model.minimize(criterion, max_nodes) != OPTIMAL:
            return best
        model.limits.append(criterion <= round(float(criterion.value)) + 0.5)
    choice = model.choice(rows)
    assert choice is not None
    return table.objective(choice), choice


class _Model:
    """The program of a table, for one criterion after another; `scale_s` is what it takes as one."""

    def __init__(self, table: FormulaTable, scale_s: float, *, is_relaxed: bool = False) -> None:
        import cvxpy as cp

        modules, llm = table.modules, table.modules[-1]
        scale_s = max(scale_s, 1e-12)  # HiGHS's tolerances are absolute
        self.bound = -math.inf
        """Of the last criterion."""
        self.picks: list[Any] = [
            cp.Variable(len(m.candidates), nonneg=is_relaxed, boolean=not is_relaxed) for m in modules
        ]
        num_scenarios, between = llm.tau_s.shape[0], (table.num_microbatches - 1) / scale_s
        tau: Any = cp.Variable(num_scenarios)
        fill: Any = cp.Variable(num_scenarios, nonneg=True)
        sync: Any = cp.Variable(nonneg=True)
        self.step = (tau.sum() + fill.sum()) / num_scenarios + sync
        self.step += (llm.fill_s.mean(axis=0) / scale_s) @ self.picks[-1]
        self.processes = sum(m.num_processes @ x for m, x in zip(modules, self.picks, strict=True))
        self.room = self.processes / table.num_processes <= 1
        self.limits = [self.room, *(x.sum() == 1 for x in self.picks)]
        deepest = float(llm.candidates.pp.max())
        for m, x in zip(modules, self.picks, strict=True):
            self.limits += [(m.tau_s * between) @ x <= tau, (m.sync_s / scale_s) @ x <= sync]
            if m is not llm:
                self.limits.append((m.fill_s / scale_s) @ x <= fill)
                self.limits.append(llm.candidates.pp @ self.picks[-1] <= np.minimum(m.max_llm_pp, deepest) @ x)

    def minimize(self, criterion: Any, max_nodes: int = MAX_NODES) -> str:
        """Status of the program with the limits so far."""
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

    def choice(self, rows: Sequence[Ints]) -> Choice | None:
        """What is picked among candidates; None without a solution."""
        picked = [x.value for x in self.picks]
        if any(x is None or not np.isfinite(x).all() or x.max() < 0.5 for x in picked):
            return None
        return tuple(int(of[x.argmax()]) for of, x in zip(rows, picked, strict=True))
