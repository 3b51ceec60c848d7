"""The planning formula as a mixed-integer program: one binary per candidate, epigraph variables for every maximum.

Linear, exact and compact: sum of candidates + 2S + 1 variables, S rows per module. No plan is made with it: it is an
independent check of the enumeration (`enumerate.py`) in tests and benches, and slower wherever both were timed.
"""

from __future__ import annotations

from typing import Any

import cvxpy as cp
import numpy as np

from dflop.plan.formula import FormulaTable

TIME_LIMIT_S = 30.0
MIP_GAP = 1e-9
INTEGRALITY = 1e-9
"""How far from 0 or 1 a binary may be: in front of seconds, that decides how far a choice may be from the best one."""


def solve_milp(table: FormulaTable) -> tuple[int, ...] | None:
    """Candidate per module that minimises `table.objective`; None when no choice is feasible.

    The solver sees candidates in the order of their content, so the order they come in never matters. Hitting the
    time limit returns the best choice known by then.
    """
    if any(not len(m.candidates) for m in table.modules):
        return None
    orders = [np.lexsort(m.candidates.content.T[::-1]) for m in table.modules]
    *encoders, llm = modules = [m.select(order) for m, order in zip(table.modules, orders, strict=True)]
    num_scenarios = llm.tau_s.shape[0]
    scale = 1.0 / max(float(max(m.fill_s.max() for m in modules)), 1e-12)  # HiGHS tolerances are absolute
    pick: dict[str, Any] = {m.module: cp.Variable(len(m.candidates), boolean=True) for m in modules}
    tau: Any = cp.Variable(num_scenarios)
    fill: Any = cp.Variable(num_scenarios, nonneg=True)
    sync: Any = cp.Variable(nonneg=True)
    steps = fill + (llm.fill_s * scale) @ pick[llm.module] + (table.num_microbatches - 1) * tau
    limits = [z.sum() == 1 for z in pick.values()]
    limits += [sum(m.num_processes @ pick[m.module] for m in modules) <= table.num_processes]
    limits += [(m.tau_s * scale) @ pick[m.module] <= tau for m in modules]
    limits += [(m.fill_s * scale) @ pick[m.module] <= fill for m in encoders]
    limits += [(m.sync_s * scale) @ pick[m.module] <= sync for m in modules]
    depth, deepest = llm.candidates.pp, float(llm.candidates.pp.max())
    limits += [depth @ pick[llm.module] <= np.minimum(m.max_llm_pp, deepest) @ pick[m.module] for m in encoders]
    problem: Any = cp.Problem(cp.Minimize(steps.sum() / num_scenarios + sync), limits)
    problem.solve(
        solver=cp.HIGHS,
        time_limit=TIME_LIMIT_S,
        mip_rel_gap=MIP_GAP,
        mip_abs_gap=MIP_GAP,
        mip_feasibility_tolerance=INTEGRALITY,
    )
    if pick[llm.module].value is None:
        return None
    choice = tuple(int(order[np.argmax(pick[m.module].value)]) for m, order in zip(modules, orders, strict=True))
    assert table.feasible(choice), f"solver returned an infeasible choice {choice} ({problem.status})"
    return choice
