"""What plans of M microbatches can be made of: columns, and the least that any plan with each of them takes.

A column is a grid for a subset of the modules: all of them, the LLM with some encoders, or a single module. Its terms
are, for each of S sampled global batches,

    tau   the slowest stage on an average microbatch, forward and backward
    fill  what a step takes beyond that in M - 1 microbatches: one microbatch through all stages, each charged with the
          more of an average microbatch and the heaviest unit of work, which crosses the pipeline once
    sync  gradient synchronisation and optimizer, behind the pipeline

and a plan of columns that hold every module once takes

    J = mean over S of [ max of fill without the LLM + fill with the LLM + (M - 1) * max of tau ] + max of sync

No simulation is in it. A plan takes at least what a column takes by itself beside the least that others add, since the
mean of a maximum is at least the maximum of the means. And the others have to be as fast on the processes that the
column leaves them: sorted by what they take, the fewest processes of all that reach a J fall as it grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import Bools
from dflop.plan.chain import mean_s
from dflop.plan.grid_choice import GridChoice, Grids
from dflop.records import LLM
from dflop.schedule.items import Ints

Cover = tuple[int, ...]
"""Columns that hold every module once."""
Found = tuple[float, Cover]
"""J and a cover of it."""
MAX_COMBINED, MAX_WIDTH = 20_000, 24
"""Covers that are evaluated at once, and columns per part of them."""
FACTORS = (1.0, 1.03, 1.1, 1.25)
"""Times the least that any plan takes: where cheap columns are looked for."""
ROUNDING = 1.0 + 1e-12
"""A bound is a sum in another order than the value it bounds."""


@dataclass(frozen=True, eq=False)
class Columns:
    """C columns; the last axis of every array is C."""

    modules: tuple[str, ...]
    num_microbatches: int
    num_processes: int
    """Available."""
    holds: Bools
    """`[modules, C]`."""
    degrees: Ints
    """`[7, C]`: tp, pp, dp, cp, replicas that share out parameters, layers that run again, ep; breaks ties."""
    tau_s: Floats
    fill_s: Floats
    """`[S, C]` both."""
    sync_s: Floats
    max_llm_pp: Floats
    """Deepest LLM that encoders can stand in front of; infinite where a column holds the LLM."""
    grids: tuple[Grids, ...]
    place: Ints
    """`[2, C]`: which of `grids`, and which in it."""

    @classmethod
    def of(
        cls, modules: Sequence[str], num_microbatches: int, num_processes: int, grids: Sequence[Grids]
    ) -> Columns | None:
        """All columns of grids; None where there are none."""
        several = tuple(each for each in grids if len(each))
        if not several:
            return None
        holds, degrees, places = [], [], []
        for k, of in enumerate(several):
            own, one = {spec.module for spec in of.specs}, np.ones(len(of), dtype=np.int64)
            holds.append(np.array([name in own for name in modules])[:, np.newaxis] & (one > 0))
            tp, cp, ep = (one * n for n in (of.mode.tp, of.mode.cp, of.mode.ep))
            degrees.append(np.stack([tp, one * of.pp, of.dp, cp, of.shards, of.num_recomputed, ep]))
            places.append(np.stack([one * k, np.arange(len(of))]))

        def every(name: str) -> Floats:
            return np.concatenate([getattr(of, name) for of in several], axis=-1)

        return cls(
            modules=tuple(modules),
            num_microbatches=num_microbatches,
            num_processes=num_processes,
            holds=np.concatenate(holds, axis=1),
            degrees=np.concatenate(degrees, axis=1),
            tau_s=every("tau_s"),
            fill_s=every("fill_s"),
            sync_s=every("sync_s"),
            max_llm_pp=every("max_llm_pp"),
            grids=several,
            place=np.concatenate(places, axis=1),
        )

    def __len__(self) -> int:
        return len(self.sync_s)

    def select(self, rows: Ints | Bools) -> Columns:
        """The columns at indices or under a mask, in that order."""
        names = ("holds", "degrees", "tau_s", "fill_s", "sync_s", "max_llm_pp", "place")
        return dataclasses.replace(self, **{name: getattr(self, name)[..., rows] for name in names})

    def choices(self, cover: Cover) -> list[GridChoice]:
        """The grids of a cover."""
        return [self.grids[k].choice(row) for k, row in self.place[:, list(cover)].T.tolist()]

    @cached_property
    def processes(self) -> Ints:
        found: Ints = self.degrees[:4].prod(axis=0)
        return found

    @property
    def num_layers(self) -> Ints:
        """Layers of each column."""
        return np.array([int(self.grids[k].layers[:, row].sum()) for k, row in self.place.T.tolist()], dtype=np.int64)

    @cached_property
    def with_llm(self) -> Bools:
        found: Bools = self.holds[self.modules.index(LLM)]
        return found

    @cached_property
    def llm_pp(self) -> Ints:
        """Stages of columns with the LLM, 0 of others."""
        found: Ints = self.degrees[1] * self.with_llm
        return found

    @cached_property
    def subset(self) -> Ints:
        """The modules of each as bits."""
        found: Ints = (1 << np.arange(len(self.modules))) @ self.holds
        return found

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """Ways to share out the modules among subsets that there are columns of."""
        return list(partitions((1 << len(self.modules)) - 1, np.unique(self.subset).tolist()))

    def values_s(self, covers: Ints) -> Floats:
        """J of `[N, parts]` columns that hold every module once, infinite where memory or processes do not allow it."""
        fills_s, with_llm = self.fill_s[:, covers], self.with_llm[covers]
        fill_s = np.where(with_llm, fills_s, 0).sum(axis=2) + np.where(with_llm, 0, fills_s).max(axis=2)
        step_s = mean_s(fill_s + (self.num_microbatches - 1) * self.tau_s[:, covers].max(axis=2))
        depth = self.llm_pp[covers].sum(axis=1, keepdims=True)
        fits = (depth <= self.max_llm_pp[covers]).all(axis=1)
        fits &= self.processes[covers].sum(axis=1) <= self.num_processes
        found: Floats = np.where(fits, step_s + self.sync_s[covers].max(axis=1), np.inf)
        return found

    @cached_property
    def bounds_s(self) -> Floats:
        """`[C]`: what any plan with a column takes at least; infinite where there is none."""
        own_s, whole = self._own_s, (1 << len(self.modules)) - 1
        reached_s, found = np.unique(own_s[np.isfinite(own_s)]), np.full(len(own_s), np.inf)
        rows = {int(subset): np.flatnonzero(self.subset == subset) for subset in np.unique(self.subset)}
        fewest = {subset: _fewest(own_s[of], self.processes[of], reached_s) for subset, of in rows.items()}
        for subset, of in rows.items():
            others = partitions(whole - subset, list(rows))
            needs = [np.sum([fewest[part] for part in parts], axis=0, initial=0) for parts in others]
            if not needs:
                continue
            need = np.minimum.reduce(needs) + np.zeros(len(reached_s))
            first = len(need) - np.searchsorted(need[::-1], self.num_processes - self.processes[of], side="right")
            found[of] = np.maximum(own_s[of], np.append(reached_s, np.inf)[first])
        return found

    @cached_property
    def _own_s(self) -> Floats:
        """`[C]`: what plans with a column take for the time that it needs itself, whatever the others are."""
        fill_s, with_llm = self.fill_s.mean(axis=0), self.with_llm
        beside_s = np.where(with_llm, 0.0, fill_s[with_llm].min(initial=np.inf))
        for held in self.holds:
            least_s = fill_s[held & ~with_llm].min(initial=np.inf)
            beside_s = np.where(with_llm & ~held, np.maximum(beside_s, least_s), beside_s)
        found: Floats = fill_s + beside_s + (self.num_microbatches - 1) * self.tau_s.mean(axis=0) + self.sync_s
        return found

    def near(self, limit_s: float) -> Ints:
        """Columns that a plan which takes no more than `limit_s` can hold."""
        return np.flatnonzero(np.isfinite(self.bounds_s) & (self.bounds_s <= limit_s * ROUNDING))

    def incumbents(self, top: int) -> list[Found]:
        """The best of good covers, as many of one column and of several: columns that are cheap for what they reach."""
        found, whole, finite = list[Found](), list[Found](), np.isfinite(self.bounds_s)
        for parts in self.parts:
            rows = [np.flatnonzero((self.subset == part) & finite) for part in parts]
            least_s = max(float(self.bounds_s[of].min(initial=np.inf)) for of in rows)
            if len(parts) == 1:
                whole = self.best(rows[0][:, np.newaxis], top)
                continue
            width = min(MAX_WIDTH, max(2, int(MAX_COMBINED ** (1 / len(parts)))))
            covers = []
            for limit_s in (least_s * factor for factor in FACTORS if np.isfinite(least_s)):
                near = [of[self.bounds_s[of] <= limit_s * ROUNDING] for of in rows]
                covers.append(combined([self._cheapest(of, width) for of in near]))
            found += self.best(np.unique(np.concatenate(covers), axis=0), top) if covers else []
        return sorted([*whole, *sorted(found, key=self.order)[:top]], key=self.order)

    def best(self, covers: Ints, top: int) -> list[Found]:
        """The best of covers `[N, parts]` with their J; of equals the first by processes, then by degrees."""
        values_s = self.values_s(covers)
        worst_s = np.partition(values_s, top - 1)[top - 1] if len(values_s) > top else np.inf
        rows = np.flatnonzero(np.isfinite(values_s) & (values_s <= worst_s))
        found = [(float(values_s[k]), tuple(covers[k].tolist())) for k in rows]
        return sorted(found, key=self.order)[:top]

    def order(self, found: Found) -> tuple[float, int, tuple[int, ...]]:
        value_s, cover = found
        rows = sorted(cover, key=lambda c: self.subset[c])
        return value_s, int(self.processes[rows].sum()), tuple(self.degrees[:, rows].T.ravel().tolist())

    def _cheapest(self, rows: Ints, width: int) -> Ints:
        """Half of them by processes, half by bound."""
        processes, bound_s = self.processes[rows], self.bounds_s[rows]
        orders = np.lexsort([bound_s, processes]), np.lexsort([processes, bound_s])
        found: Ints = rows[np.union1d(*(order[: width // 2] for order in orders))]
        return found


def combined(rows: Sequence[Ints]) -> Ints:
    """`[N, parts]`: every combination of columns of each part."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*rows, indexing="ij")], axis=1)


def partitions(subset: int, available: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to write a set of modules as disjoint sets of those available."""
    if subset == 0:
        yield ()
    for part in available:
        if part & subset & -subset and part & subset == part:
            yield from ((part, *others) for others in partitions(subset - part, available))


def _fewest(own_s: Floats, processes: Ints, reached_s: Floats) -> Ints:
    """`[R]`: the fewest processes on which one of columns takes no more than each of `reached_s`."""
    order = np.argsort(own_s, kind="stable")
    fewest = np.minimum.accumulate(np.append(2**40, processes[order]))
    found: Ints = fewest[np.searchsorted(own_s[order], reached_s, side="right")]
    return found
