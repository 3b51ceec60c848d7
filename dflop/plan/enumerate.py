"""The best choices of the planning formula, exactly, without looking at most of them.

The mean over scenarios of a maximum is at least the maximum of the means, so a choice costs at least

    max_e mean fill_e + mean fill_llm + (M - 1) * max(mean tau) + max sync,

which needs no scenarios and is already tight for an encoder and an LLM by themselves. Candidates that cannot be part
of a choice near the best are left out by a bound of their own. The LLM's others are visited in the order of the bound
above, each with the encoder candidates whose bound stays below the worst choice kept so far, and what survives is
evaluated in full. Ties go to fewer processes, then to smaller degrees: never to what came first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.formula import FormulaTable
from dflop.schedule.items import Ints

MAX_AT_ONCE = 4_000_000
"""Combinations held in memory at a time."""
LIMITS = (1.1, 1.5, 4.0)
"""Times the least any choice can take: where enough choices are found below, the others need no look."""
LARGEST_S = 1e300
SLACK = 1.0 + 1e-12
"""A bound is a sum in another order than the value it bounds."""


@dataclass(frozen=True, slots=True)
class _Means:
    """What the bound needs to know, per choice of some modules; `index` is `[N, modules]`, the others `[N]`."""

    index: Ints
    fill_s: Floats
    """Of the encoders, the slowest one's."""
    tau_s: Floats
    sync_s: Floats
    num_processes: Ints

    def __getitem__(self, which: Ints | slice) -> _Means:
        return _Means(
            self.index[which], self.fill_s[which], self.tau_s[which], self.sync_s[which], self.num_processes[which]
        )


def best_choices(
    table: FormulaTable, top: int, *, max_per_llm: int | None = None
) -> list[tuple[float, tuple[int, ...]]]:
    """The `top` feasible choices with their objective, best first.

    Args:
        table: Formula terms of every candidate.
        top: How many.
        max_per_llm: Of one LLM candidate take its best so many only; None: any number.
    """
    bounds = _Bounds.of(table)
    for limit_s in (*(bounds.least_s * factor for factor in LIMITS), np.inf):
        search = _Search.of(table, bounds, limit_s, top, top if max_per_llm is None else max_per_llm)
        search.run()
        if len(search.kept) == top and search.values_s[-1] <= limit_s:
            break
    return [
        (value, tuple(choice)) for value, choice in zip(search.values_s.tolist(), search.kept.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Objectives that no choice with a candidate can stay below."""

    per_module_s: tuple[Floats, ...]
    """`[C]` each."""
    least_s: float
    """Of any choice."""

    @classmethod
    def of(cls, table: FormulaTable) -> _Bounds:
        """A candidate by itself, and the best of every other module with the processes it leaves."""
        total, modules = table.num_processes, table.modules
        llm_fill_s = float(modules[-1].fill_s.mean(axis=0).min(initial=np.inf))
        own_s = [
            m.fill_s.mean(axis=0)
            + (0.0 if m is modules[-1] else llm_fill_s)
            + (table.num_microbatches - 1) * m.tau_s.mean(axis=0)
            + m.sync_s
            for m in modules
        ]
        floors_s = [_floor_s(own, m.num_processes, total) for own, m in zip(own_s, modules, strict=True)]
        fewest = [int(m.num_processes.min(initial=total + 1)) for m in modules]
        found = []
        for k, m in enumerate(modules):
            bound_s = np.where(m.num_processes + sum(fewest) - fewest[k] <= total, own_s[k], np.inf)
            for j in range(len(modules)):
                if j != k:
                    left = total - m.num_processes - (sum(fewest) - fewest[k] - fewest[j])
                    bound_s = np.maximum(bound_s, np.where(left >= 0, floors_s[j][np.maximum(left, 0)], np.inf))
            found.append(bound_s)
        return cls(tuple(found), max(float(bound_s.min(initial=np.inf)) for bound_s in found))


def _floor_s(own_s: Floats, num_processes: Ints, total: int) -> Floats:
    """`[total + 1]`: the least of `own_s` on at most so many processes."""
    floor_s = np.full(total + 1, np.inf)
    fit = num_processes <= total
    np.minimum.at(floor_s, num_processes[fit], own_s[fit])
    return np.minimum.accumulate(floor_s)


@dataclass(slots=True)
class _Search:
    table: FormulaTable
    limit_s: float
    """Choices above it are not looked for."""
    top: int
    per_llm: int
    means: tuple[_Means, ...]
    """Of the candidates that can be part of a choice below the limit."""
    pair_s: list[Floats]
    """Per encoder `[C encoder, C LLM]`: bound of the two alone, infinite where they do not go together."""
    bound_s: Floats
    """`[C LLM]`."""
    kept: Ints
    """`[K, modules]` best choices so far, in order."""
    values_s: Floats
    """`[K]`."""

    @classmethod
    def of(cls, table: FormulaTable, bounds: _Bounds, limit_s: float, top: int, per_llm: int) -> _Search:
        means = []
        for m, bound_s in zip(table.modules, bounds.per_module_s, strict=True):
            rows = np.flatnonzero(np.isfinite(bound_s) & (bound_s <= limit_s * SLACK))
            fill_s, tau_s = m.fill_s.mean(axis=0)[rows], m.tau_s.mean(axis=0)[rows]
            means.append(_Means(rows[:, np.newaxis], fill_s, tau_s, m.sync_s[rows], m.num_processes[rows]))
        llm, pp = means[-1], table.modules[-1].candidates.pp[means[-1].index[:, 0]]
        pair_s, bound_s = [], bounds.per_module_s[-1][llm.index[:, 0]]
        for e, m in zip(means[:-1], table.modules, strict=False):
            value_s = np.maximum(e.tau_s[:, np.newaxis], llm.tau_s)
            value_s *= table.num_microbatches - 1
            value_s += e.fill_s[:, np.newaxis] + llm.fill_s
            value_s += np.maximum(e.sync_s[:, np.newaxis], llm.sync_s)
            fit = e.num_processes[:, np.newaxis] + llm.num_processes <= table.num_processes
            fit &= pp <= m.max_llm_pp[e.index]
            pair_s.append(np.where(fit, value_s, np.inf))
            bound_s = np.maximum(bound_s, pair_s[-1].min(axis=0, initial=np.inf))
        none = np.zeros((0, len(means)), dtype=np.int64)
        return cls(table, limit_s, top, per_llm, tuple(means), pair_s, bound_s, none, np.zeros(0))

    def run(self) -> None:
        """Visit LLM candidates, most promising first, until no other can be part of a choice worth keeping."""
        for llm in np.argsort(self.bound_s, kind="stable").tolist():
            if self.bound_s[llm] > self.cutoff_s:
                break
            self.visit(llm)

    @property
    def cutoff_s(self) -> float:
        """No choice above it can be kept; finite, so that what does not fit never passes."""
        worst_s = float(self.values_s[-1]) if len(self.values_s) >= self.top else LARGEST_S
        return min(worst_s, self.limit_s) * SLACK

    def visit(self, llm: int) -> None:
        """Keep the best choices with this LLM candidate, as far as they belong to the best of all."""
        found, values_s, cutoff_s = np.zeros((0, len(self.means)), dtype=np.int64), np.zeros(0), self.cutoff_s
        for choices, bounds_s in self._combinations(llm):
            order = np.argsort(bounds_s, kind="stable")
            done, size = 0, 64
            while done < len(order) and bounds_s[order[done]] <= cutoff_s:
                block = choices[order[done : done + size]]
                found, values_s = self._best(
                    np.concatenate([found, block]),
                    np.concatenate([values_s, self.table.objectives(block)]),
                    self.per_llm,
                )
                if len(values_s) == self.per_llm:
                    cutoff_s = min(cutoff_s, float(values_s[-1]) * SLACK)
                done, size = done + size, 4 * size
        self.kept, self.values_s = self._best(
            np.concatenate([self.kept, found]), np.concatenate([self.values_s, values_s]), self.top
        )

    def _combinations(self, llm: int) -> Iterator[tuple[Ints, Floats]]:
        """(choices `[N, modules]`, bounds `[N]`) of an LLM candidate with any of each encoder, below the cutoff."""
        *encoders, llms = self.means
        one = llms[slice(llm, llm + 1)]
        rows = [e[np.flatnonzero(pair[:, llm] <= self.cutoff_s)] for e, pair in zip(encoders, self.pair_s, strict=True)]
        start = _Means(one.index[:, :0], np.zeros(1), one.tau_s, one.sync_s, one.num_processes)
        for found in self._extended(start, rows, float(one.fill_s[0])):
            choices = np.concatenate([found.index, np.repeat(one.index, len(found.index), axis=0)], axis=1)
            yield choices, self._bounds(found, float(one.fill_s[0]))

    def _extended(self, partial: _Means, rows: Sequence[_Means], llm_fill_s: float) -> Iterator[_Means]:
        """Partial choices with one candidate more of each encoder in `rows`, in blocks that fit in memory."""
        if not rows:
            yield partial
            return
        encoder = rows[0]
        step = max(1, MAX_AT_ONCE // max(len(encoder.index), 1))
        for start in range(0, len(partial.index), step):
            joined = _joined(partial[start : start + step], encoder)
            fit = joined.num_processes <= self.table.num_processes
            fit &= self._bounds(joined, llm_fill_s) <= self.cutoff_s
            yield from self._extended(joined[np.flatnonzero(fit)], rows[1:], llm_fill_s)

    def _bounds(self, choices: _Means, llm_fill_s: float) -> Floats:
        bounds: Floats = (
            choices.fill_s + llm_fill_s + (self.table.num_microbatches - 1) * choices.tau_s + choices.sync_s
        )
        return bounds

    def _best(self, choices: Ints, values_s: Floats, most: int) -> tuple[Ints, Floats]:
        """The best `most` choices in order, ties broken by content."""
        if len(values_s) > most:
            good = values_s <= np.partition(values_s, most - 1)[most - 1]
            choices, values_s = choices[good], values_s[good]
        picked = list(zip(self.table.modules, choices.T, strict=True))
        num_processes = np.sum([m.num_processes[c] for m, c in picked], axis=0)
        content = [column for m, c in picked for column in m.candidates.content[c].T]
        order = np.lexsort([*reversed(content), num_processes, values_s])[:most]
        return choices[order], values_s[order]


def _joined(partial: _Means, encoder: _Means) -> _Means:
    """Every partial choice with every candidate of one encoder more."""
    n, c = len(partial.index), len(encoder.index)
    left, right = np.repeat(np.arange(n), c), np.tile(np.arange(c), n)
    return _Means(
        np.concatenate([partial.index[left], encoder.index[right]], axis=1),
        np.maximum(partial.fill_s[left], encoder.fill_s[right]),
        np.maximum(partial.tau_s[left], encoder.tau_s[right]),
        np.maximum(partial.sync_s[left], encoder.sync_s[right]),
        partial.num_processes[left] + encoder.num_processes[right],
    )
