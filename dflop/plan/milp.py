"""The planning formula as a mixed-integer program: one binary per candidate, epigraph variables for every maximum.

Linear, exact and compact: sum of candidates + 2S variables, S rows per module. With three modules it scales where
enumeration does not (three modules on 256 devices: 3 s per number of microbatches, cvxpy's overhead below 0.2 s).
"""

from __future__ import annotations

from typing import Any

import cvxpy as cp
import numpy as np

from dflop.plan.formula import FormulaTable

TIME_LIMIT_S = 30.0
MIP_GAP = 1e-9


def solve_milp(table: FormulaTable) -> tuple[int, ...] | None:
    """Candidate per module that minimises `table.objective`; None when no choice is feasible.

    Hitting the time limit returns the best choice known by then: the only place where a plan may depend on the
    speed of the machine, and one that the simulator re-rank sees next to other candidates.
    """
    if any(not len(m.num_processes) for m in table.modules):
        return None
    *encoders, llm = table.modules
    num_scenarios = llm.tau_s.shape[0]
    scale = 1.0 / max(float(max(m.fill_s.max() for m in table.modules)), 1e-12)  # HiGHS tolerances are absolute
    pick: dict[str, Any] = {m.module: cp.Variable(len(m.num_processes), boolean=True) for m in table.modules}
    tau: Any = cp.Variable(num_scenarios)
    fill: Any = cp.Variable(num_scenarios, nonneg=True)
    steps = fill + (llm.fill_s * scale) @ pick[llm.module] + (table.num_microbatches - 1) * tau
    limits = [z.sum() == 1 for z in pick.values()]
    limits += [sum(m.num_processes @ pick[m.module] for m in table.modules) <= table.num_processes]
    limits += [(m.tau_s * scale) @ pick[m.module] <= tau for m in table.modules]
    limits += [(m.fill_s * scale) @ pick[m.module] <= fill for m in encoders]
    deepest = float(llm.pp.max())
    limits += [llm.pp @ pick[llm.module] <= np.minimum(m.max_llm_pp, deepest) @ pick[m.module] for m in encoders]
    problem: Any = cp.Problem(cp.Minimize(steps.sum() / num_scenarios), limits)
    problem.solve(solver=cp.HIGHS, time_limit=TIME_LIMIT_S, mip_rel_gap=MIP_GAP, mip_abs_gap=MIP_GAP)
    if pick[llm.module].value is None:
        return None
    choice = tuple(int(np.argmax(pick[m.module].value)) for m in table.modules)
    assert table.feasible(choice), f"solver returned an infeasible choice {choice} ({problem.status})"
    return choice
