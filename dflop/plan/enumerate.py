"""Every choice of the planning formula, evaluated exactly: cross-check of the program and source of runners-up.

One broadcast over all encoder candidates per LLM candidate: 0.1-0.5 s for two modules on 64-256 devices. Three
modules on large clusters are left to the program (`MAX_CHOICES`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.formula import FormulaTable

MAX_CHOICES = 2_000_000


def num_choices(table: FormulaTable) -> int:
    """Choices of one candidate per module, feasible or not."""
    return math.prod(len(m.num_processes) for m in table.modules)


def best_choices(table: FormulaTable, top: int) -> list[tuple[float, tuple[int, ...]]]:
    """The `top` feasible choices with their objective, best first, ties by candidate index."""
    *encoders, llm = table.modules
    shape = tuple(len(e.num_processes) for e in encoders)
    # Axes: scenario, then one per encoder.
    tau = _combine([_along(e.tau_s, axis, len(shape)) for axis, e in enumerate(encoders)])
    fill = _combine([_along(e.fill_s, axis, len(shape)) for axis, e in enumerate(encoders)])
    processes = sum(
        (_along(e.num_processes.astype(float), axis, len(shape)) for axis, e in enumerate(encoders)), np.zeros(1)
    )
    depth = -_combine([_along(-e.max_llm_pp, axis, len(shape)) for axis, e in enumerate(encoders)], empty=-np.inf)
    found: list[tuple[float, tuple[int, ...]]] = []
    for c in range(len(llm.num_processes)):
        column = (slice(None), *(np.newaxis,) * len(shape))
        slowest = np.maximum(tau, llm.tau_s[:, c][column])
        value = (fill + llm.fill_s[:, c][column] + (table.num_microbatches - 1) * slowest).mean(axis=0)
        value = np.where(
            (processes + llm.num_processes[c] <= table.num_processes) & (llm.pp[c] <= depth), value, np.inf
        )
        flat = value.reshape(-1)
        for i in np.argsort(flat, kind="stable")[:top]:
            if flat[i] < np.inf:
                found.append((float(flat[i]), (*(int(k) for k in np.unravel_index(i, shape)), c)))
    return heapq.nsmallest(top, found)


def _along(values: Floats, axis: int, num_axes: int) -> Floats:
    """`[..., C]` with C moved to encoder axis `axis` of `num_axes`."""
    lead = values.shape[:-1]
    return values.reshape(*lead, *(values.shape[-1] if a == axis else 1 for a in range(num_axes)))


def _combine(parts: Sequence[Floats], empty: float = 0.0) -> Floats:
    """Elementwise maximum with broadcasting."""
    total: Floats = np.array(empty)
    for i, part in enumerate(parts):
        total = part if i == 0 else np.maximum(total, part)
    return total
