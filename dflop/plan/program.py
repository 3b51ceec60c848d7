"""The best plan of one number of microbatches, as a mixed-integer program of columns that cover every module once.

A column is a grid for one module, or a chain of stages that holds all of them: whether modules share ranks is for the
program to decide. One binary per column that a plan better than the best known can hold (`columns.py`), an epigraph
variable for every maximum of the formula: exact. HiGHS stops at a number of nodes, never at a time, so no plan hangs on
how busy a machine is; a stop leaves the best plan known, and says how much better one could be. Ties go to fewer
processes, then to smaller degrees. What is proven is proven of the formula and of the cuts that `chain.py` and
`candidates.py` give each grid: simulated steps of two plans may be the other way round.

cvxpy takes 0.7 s to import: only who solves a program imports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dflop.plan.columns import MAX_COMBINED, ROUNDING, Choice, Columns, Found, best_of, combined
from dflop.plan.formula import FormulaTable
from dflop.records import Plan, PlanProgram
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
    chains: Sequence[Plan]
    """Columns that hold all modules, best first."""
    found: list[Found]
    """Good choices of the table up to the cutoff, best first; the best of all, unless a chain is better."""
    program: PlanProgram


def optima(
    tables: Sequence[FormulaTable],
    known_s: float,
    top: int,
    *,
    chains: Mapping[int, Sequence[Plan]] = MappingProxyType({}),
    ratio: float = CUTOFF_RATIO,
    kept: float = CUTOFF_RATIO,
    max_nodes: int = MAX_NODES,
) -> list[Optimum]:
    """Per table, in their order, the best choices and what is proven of all plans.

    Tables are visited in the order of their bounds, and solved where the bound is within the cutoff.

    Args:
        tables: Of numbers of microbatches, or parts of one.
        known_s: Formula value of the best plan known otherwise; infinite: none.
        top: Choices per table.
        chains: By number of microbatches, plans in which one chain of stages holds all modules, best first: all that
            the cutoff leaves, or the best of them.
        ratio: Of the best known value, what is looked at.
        kept: Of it, what is returned; the best choice of all tables in any case.
        max_nodes: Of each program.
    """
    columns = [Columns.of(table) for table in tables]
    incumbents = [each.incumbents(top) for each in columns]
    of_table = [chains.get(table.num_microbatches, ()) for table in tables]
    known_s = min([known_s, *(found[0][0] for found in incumbents if found), *map(_first_s, of_table)])
    optimum: dict[int, Optimum] = {}
    for k in sorted(range(len(tables)), key=lambda k: (columns[k].least_s, k)):
        optimum[k] = _optimum(columns[k], incumbents[k], of_table[k], known_s * ratio, max_nodes)
        known_s = min(known_s, optimum[k].program.objective_s)
    best_s = min((o.found[0][0] for o in optimum.values() if o.found), default=math.inf)
    near_s = max(known_s * kept, best_s)
    return [replace(o, found=[f for f in o.found[:top] if f[0] <= near_s]) for _, o in sorted(optimum.items())]


def good_choice(table: FormulaTable) -> Found | None:
    """A choice that is feasible, not the best one; None when there is none, which takes a program to know at times."""
    columns = Columns.of(table)
    found = columns.incumbents(1) or _optimum(columns, [], (), math.inf, MAX_NODES).found
    return found[0] if found else None


def process_price_s(best: Optimum) -> float:
    """Seconds of the formula that one process more would save in the relaxed program.

    Right within a half for a node more, too hopeful beyond.
    """
    objective_s = best.program.objective_s
    model = _Model(
        best.table, best.chains, objective_s, is_relaxed=True
    )  # whole: bounds leave out what is too large today
    model.minimize(model.step)
    return float(model.room.dual_value) * objective_s / best.table.num_processes


def _optimum(
    columns: Columns, incumbents: list[Found], chains: Sequence[Plan], limit_s: float, max_nodes: int
) -> Optimum:
    table, chain_s = columns.table, _first_s(chains)
    # Where cheap candidates do not go together, a program of them alone knows a layout to try besides a better chain.
    found = incumbents or (_optimum(columns, [], (), limit_s, max_nodes).found if chains else [])
    incumbent_s = min([chain_s, *(value_s for value_s, _ in found[:1])])
    near_s = min(incumbent_s, limit_s)
    rows, near = columns.under(near_s), [c for c in chains if c.formula_step_s <= near_s * ROUNDING]
    if not all(map(len, rows)):
        rows = [of[:0] for of in rows]  # what lacks a module is no plan
    bound_s = min(columns.least_s, chain_s if chains else limit_s)
    status = BOUNDED if math.isfinite(bound_s) else INFEASIBLE
    if near or any(map(len, rows)):
        scale_s = min(columns.least_s, chain_s)
        model = _Model(table.select(rows), near, scale_s)
        status = model.minimize(model.step, max_nodes)
        bound_s = max(bound_s, min(model.bound * scale_s, limit_s))  # others were left out beyond the limit
        if status != NODE_LIMIT and model.bound * scale_s > limit_s * (1 + GAP):
            status = BOUNDED
        if (choice := model.choice(rows)) is not None:
            assert table.feasible(choice), f"the solver's choice {choice} is not feasible ({status})"
            found = best_of(table, np.array([choice, *(c for _, c in found)]), len(found) + 1)
            if status == OPTIMAL:
                best = _first_of_equals(columns, found[0], max_nodes)
                found = [best, *(each for each in found if each[1] != best[1])]
    objective_s = min([chain_s, *(value_s for value_s, _ in found[:1])])
    bound_s = min(bound_s, objective_s)
    program = PlanProgram(
        run_id="",
        plan_id="",
        num_microbatches=table.num_microbatches,
        num_columns=sum(len(m.candidates) for m in table.modules) + len(chains),
        num_columns_left=sum(map(len, rows)) + len(near),
        incumbent_s=incumbent_s,
        objective_s=objective_s,
        bound_s=bound_s,
        gap_frac=1.0 - bound_s / objective_s if math.isfinite(bound_s) else 0.0,
        status=status,
        process_price_s=math.nan,
    )
    return Optimum(table, chains, found, program)


def _first_s(chains: Sequence[Plan]) -> float:
    return chains[0].formula_step_s if chains else math.inf


def _first_of_equals(columns: Columns, best: Found, max_nodes: int) -> Found:
    """Of all choices as good as the best one, that with the fewest processes and then the smallest degrees."""
    table, rows = columns.table, columns.under(best[0] * (1 + GAP))
    if math.prod(map(len, rows)) <= MAX_COMBINED:
        return best_of(table, combined(table, rows), 1)[0]
    rows = [of[np.lexsort(m.candidates.content[of].T[::-1])] for m, of in zip(table.modules, rows, strict=True)]
    model = _Model(table.select(rows), (), best[0])
    model.limits.append(model.step <= 1 + GAP)
    for criterion in (model.processes, *(np.arange(x.size) @ x for x in model.picks)):
        if model.minimize(criterion, max_nodes) != OPTIMAL:
            return best
        model.limits.append(criterion <= round(float(criterion.value)) + 0.5)
    choice = model.choice(rows)
    assert choice is not None
    return table.objective(choice), choice


class _Model:
    """The program of a table and chains, for one criterion after another; `scale_s` is what it takes as one."""

    def __init__(
        self, table: FormulaTable, chains: Sequence[Plan], scale_s: float, *, is_relaxed: bool = False
    ) -> None:
        import cvxpy as cp

        modules, llm = table.modules, table.modules[-1]
        scale_s = max(scale_s, 1e-12)  # HiGHS's tolerances are absolute
        self.bound = -math.inf
        """Of the last criterion."""

        def binaries(num: int) -> Any:
            return cp.Variable(num, nonneg=is_relaxed, boolean=not is_relaxed) if num else np.zeros(0)

        self.picks: list[Any] = [binaries(len(m.candidates)) for m in modules]
        whole = binaries(len(chains))
        num_scenarios, between = llm.tau_s.shape[0], (table.num_microbatches - 1) / scale_s
        tau: Any = cp.Variable(num_scenarios, nonneg=True)
        fill: Any = cp.Variable(num_scenarios, nonneg=True)
        sync: Any = cp.Variable(nonneg=True)
        self.step = (tau.sum() + fill.sum()) / num_scenarios + sync
        self.step += (llm.fill_s.mean(axis=0) / scale_s) @ self.picks[-1]
        self.step += np.array([c.formula_step_s / scale_s for c in chains]) @ whole
        self.processes = sum(m.num_processes @ x for m, x in zip(modules, self.picks, strict=True))
        self.processes += np.array([c.num_processes for c in chains]) @ whole
        self.room = self.processes / table.num_processes <= 1
        self.limits = [self.room, *(x.sum() + whole.sum() == 1 for x in self.picks)]
        deepest = float(llm.candidates.pp.max(initial=0))
        for m, x in zip(modules, self.picks, strict=True) if len(llm.candidates) else ():
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
        """What is picked among candidates; None without a solution, and where that is a chain."""
        picked = [x.value for x in self.picks if x.size]
        if not picked or any(x is None or not np.isfinite(x).all() or x.max() < 0.5 for x in picked):
            return None
        return tuple(int(of[x.argmax()]) for of, x in zip(rows, picked, strict=True))
