"""What a plan can be made of for one number of microbatches, with the least that any plan with each part of it takes.

The mean over scenarios of a maximum is at least the maximum of the means, so a plan with a candidate takes at least
what the candidate takes by itself. It takes at least J, too, if the other modules cannot be as fast as J on the
processes that the candidate leaves them: sorted by what they take by themselves, the fewest processes of all modules
that reach a J fall as it grows, and the least J that goes with a candidate is found in all of them at once. Of 1,000 to
11,000 candidates of a number of microbatches 90 to 1,200 stay below the value of a plan that is known, and the best
combinations of those that are cheap for what they reach are such plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.formula import FormulaTable
from dflop.schedule.items import Ints

Choice = tuple[int, ...]
"""A candidate of every module."""
Found = tuple[float, Choice]
"""J and a choice of it."""
MAX_COMBINED, MAX_WIDTH = 20_000, 24
"""Choices that are evaluated at once, and candidates per module that go into them."""
FACTORS = (1.0, 1.03, 1.1, 1.25)
"""Times the least that any plan takes: where cheap candidates are looked for."""
ROUNDING = 1.0 + 1e-12
"""A bound is a sum in another order than the value it bounds."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Candidates of every module with their bounds."""

    table: FormulaTable
    bound_s: tuple[Floats, ...]
    """`[C]` per module: what any plan with the candidate takes at least; infinite where there is none."""

    @classmethod
    def of(cls, table: FormulaTable) -> Columns:
        """All candidates of a table."""
        own_s = _own_s(table)
        reached_s = np.unique(np.concatenate(own_s))
        fewest = np.stack(
            [_fewest(own, m.num_processes, reached_s) for own, m in zip(own_s, table.modules, strict=True)]
        )
        bounds_s = []
        for own, m, its in zip(own_s, table.modules, fewest, strict=True):
            others = fewest.sum(axis=0) - its
            first = len(others) - np.searchsorted(others[::-1], table.num_processes - m.num_processes, side="right")
            bounds_s.append(np.maximum(own, np.append(reached_s, np.inf)[first]))
        return cls(table, tuple(bounds_s))

    @property
    def least_s(self) -> float:
        """What any plan takes at least; infinite where there is none."""
        return max(float(bound_s.min(initial=np.inf)) for bound_s in self.bound_s)

    def under(self, limit_s: float) -> list[Ints]:
        """Per module the candidates that a plan which takes no more than `limit_s` can hold."""
        return [np.flatnonzero(np.isfinite(bound_s) & (bound_s <= limit_s * ROUNDING)) for bound_s in self.bound_s]

    def incumbents(self, top: int) -> list[Found]:
        """(J, choice) of good plans, best first: combinations of candidates that are cheap for what they reach."""
        if not np.isfinite(self.least_s):
            return []
        width = min(MAX_WIDTH, max(2, int(MAX_COMBINED ** (1 / len(self.bound_s)))))
        found = [
            combined(self.table, [self._cheapest(k, rows, width) for k, rows in enumerate(self.under(limit_s))])
            for limit_s in (self.least_s * factor for factor in FACTORS)
        ]
        return best_of(self.table, np.unique(np.concatenate(found), axis=0), top)

    def _cheapest(self, module: int, rows: Ints, width: int) -> Ints:
        """Half of them by processes, half by bound."""
        processes, bound_s = self.table.modules[module].num_processes[rows], self.bound_s[module][rows]
        orders = np.lexsort([bound_s, processes]), np.lexsort([processes, bound_s])
        found: Ints = rows[np.union1d(*(order[: width // 2] for order in orders))]
        return found


def combined(table: FormulaTable, rows: Sequence[Ints]) -> Ints:
    """`[N, modules]`: the feasible choices among candidates of each module."""
    choices = np.stack([axis.ravel() for axis in np.meshgrid(*rows, indexing="ij")], axis=1)
    pp = table.modules[-1].candidates.pp[choices[:, -1]]
    fits = np.sum([m.num_processes[c] for m, c in zip(table.modules, choices.T, strict=True)], axis=0)
    feasible = fits <= table.num_processes
    for m, c in zip(table.modules, choices.T, strict=True):
        feasible &= pp <= m.max_llm_pp[c]
    found: Ints = choices[feasible]
    return found


def best_of(table: FormulaTable, choices: Ints, top: int) -> list[Found]:
    """The best of choices with their J, ties broken by fewer processes, then by content: never by their order."""
    values_s = table.objectives(choices)
    if len(values_s) > top:
        good = values_s <= np.partition(values_s, top - 1)[top - 1]
        choices, values_s = choices[good], values_s[good]
    picked = list(zip(table.modules, choices.T, strict=True))
    num_processes = np.sum([m.num_processes[c] for m, c in picked], axis=0)
    content = [column for m, c in picked for column in m.candidates.content[c].T]
    order = np.lexsort([*reversed(content), num_processes, values_s])[:top]
    return list(zip(values_s[order].tolist(), map(tuple, choices[order].tolist()), strict=True))


def _own_s(table: FormulaTable) -> list[Floats]:
    """`[C]` per module: what plans with a candidate take for the time it needs itself, whatever the others are."""
    *encoders, llm = table.modules
    encoder_s = max((float(m.fill_s.mean(axis=0).min(initial=np.inf)) for m in encoders), default=0.0)
    llm_s = float(llm.fill_s.mean(axis=0).min(initial=np.inf))
    fills_s = [np.maximum(m.fill_s.mean(axis=0), encoder_s) + llm_s for m in encoders]
    fills_s.append(llm.fill_s.mean(axis=0) + encoder_s)
    between = table.num_microbatches - 1
    return [
        fill_s + between * m.tau_s.mean(axis=0) + m.sync_s for fill_s, m in zip(fills_s, table.modules, strict=True)
    ]


def _fewest(own_s: Floats, num_processes: Ints, reached_s: Floats) -> Ints:
    """`[R]`: the fewest processes on which a module by itself takes no more than each of `reached_s`."""
    order = np.argsort(own_s, kind="stable")
    fewest = np.minimum.accumulate(np.append(2**40, num_processes[order]))
    found: Ints = fewest[np.searchsorted(own_s[order], reached_s, side="right")]
    return found
