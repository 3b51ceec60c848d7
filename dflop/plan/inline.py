"""Inline plans: one chain of stages on one grid, encoder layers before those of the LLM, cut by predicted time.

With one stage this is plain data parallelism. A sample and its media stay together, so a unit of work is a sample, and
the formula has one pipeline only:

    J = mean_s [ fill[s] + (M - 1) * tau[s] ] + sync

with tau the slowest stage on an average microbatch and fill the time one microbatch takes through all stages, each
charged with the more of an average microbatch and the heaviest single sample.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import MAX_PP, Bools, layer_and_edge_seconds, nearest_power, recompute_ways
from dflop.plan.drafts import fits, inline_draft
from dflop.plan.memory import StageBytes, ends_and_edge, in_flight, stage_bytes
from dflop.plan.partition import Cuts, best_cuts, free_cuts
from dflop.plan.space import Problem
from dflop.plan.sync import chain_sync_s
from dflop.records import ModuleSpec, ParallelSpec, Plan
from dflop.schedule.items import Ints

MAX_ALIKE = 2


def inline_choices(problem: Problem, num_microbatches: int, top: int | None = 16) -> list[tuple[float, Plan]]:
    """Inline drafts that fit in memory with their formula value, best first, fewer processes first among equals.

    Every tp, pp and dp on at most all processes, with and without recomputation where both are of use. Layers are cut
    by time; where that does not fit, and more replicas would not help, by time within the memory.

    Args:
        problem: What to plan for.
        num_microbatches: Per step.
        top: Drafts to return, of one tp and pp no more than two; None: all.
    """
    found: list[_Choice] = []
    tps = set.intersection(*(set(problem.tps(spec)) for spec in problem.specs))
    for tp in sorted(tps):
        ways = set.intersection(*(set(recompute_ways(problem, spec.module, tp)) for spec in problem.specs))
        fitting: set[ParallelSpec] = set()
        for recompute in sorted(ways):
            chain = _Chain.of(problem, tp, recompute, num_microbatches)
            choices = [c for pp in range(1, chain.max_pp + 1) for c in chain.choices(pp)]
            found += [c for c in choices if c.parallel not in fitting]  # the same without recomputation is faster
            fitting |= {c.parallel for c in choices}
    found.sort(key=lambda c: (c.formula_s, c.parallel.num_processes, c.parallel.tp, c.parallel.pp, c.recompute))
    kept = found if top is None else _varied(found)[:top]
    return [(c.formula_s, _draft(problem, num_microbatches, c)) for c in kept]


@dataclass(frozen=True, slots=True)
class _Choice:
    formula_s: float
    parallel: ParallelSpec
    layers: dict[str, tuple[int, ...]]
    recompute: bool


def _varied(choices: Sequence[_Choice]) -> list[_Choice]:
    """The best of each tp and pp: a few replicas less are all but the same plan, only slower."""
    seen: Counter[tuple[int, int]] = Counter()
    kept = []
    for choice in choices:
        kind = (choice.parallel.tp, choice.parallel.pp)
        seen[kind] += 1
        if seen[kind] <= MAX_ALIKE:
            kept.append(choice)
    return kept


def _draft(problem: Problem, num_microbatches: int, choice: _Choice) -> Plan:
    plan = inline_draft(
        problem,
        num_microbatches,
        choice.parallel,
        choice.layers,
        recompute=choice.recompute,
        shard_optimizer=problem.space.shard_optimizer and choice.parallel.dp > 1,
        formula_s=choice.formula_s,
    )
    assert fits(problem, plan), f"inline plan {plan.plan_id} does not fit where its formula said it would"
    return plan


@dataclass(frozen=True, slots=True)
class _Chain:
    """All modules one behind the other at one tp, one way of running and one number of microbatches."""

    problem: Problem
    tp: int
    recompute: bool
    num_microbatches: int
    unit_layers: Ints
    """`[modules, units]`: what can be cut off. One layer, or all layers of a module that must stay on one stage."""
    heaviest_s: tuple[tuple[Floats, Floats], ...]
    """Per module (layer, edge) seconds `[S, 1]` of the heaviest sample of each scenario."""

    @classmethod
    def of(cls, problem: Problem, tp: int, recompute: bool, num_microbatches: int) -> _Chain:
        sizes = [[s.num_layers] if s.max_pp == 1 else [1] * s.num_layers for s in problem.specs]
        owner = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes])
        unit_layers = (owner == np.arange(len(sizes))[:, np.newaxis]) * np.concatenate(sizes)
        heaviest_s = tuple(
            tuple(
                part[:, np.newaxis]
                for part in layer_and_edge_seconds(problem.cost, spec.module, load, tp=tp, recompute=recompute)
            )
            for spec, load in zip(problem.specs, problem.heaviest_samples.values(), strict=True)
        )
        return cls(problem, tp, recompute, num_microbatches, unit_layers, heaviest_s)  # type: ignore[arg-type]

    @property
    def specs(self) -> tuple[ModuleSpec, ...]:
        return self.problem.specs

    @property
    def max_pp(self) -> int:
        """A module that can be cut at all limits the whole chain, which is safe: it never spans more stages."""
        limits = [s.max_pp for s in self.specs if s.max_pp > 1]
        return min([MAX_PP, self.problem.cluster.num_processes // self.tp, int(self.unit_layers.shape[1]), *limits])

    def choices(self, pp: int) -> list[_Choice]:
        """Choices with `pp` stages, one per number of replicas that fits."""
        cluster, batch = self.problem.cluster, self.problem.global_batch_size
        most = min(batch // self.num_microbatches, cluster.num_processes // (self.tp * pp))
        dp = np.array(self.problem.dps(most), dtype=np.int64)
        if not len(dp):
            return []
        layers = self._layers([free_cuts(seconds, pp) for seconds in self._unit_seconds(dp)])
        fit = self._fit(layers, dp)
        if not fit[-1]:  # the most replicas need the least memory
            cuts = self._cuts_within_memory(pp, int(dp[-1]))
            if cuts is not None:
                layers[:, -1] = self._layers([cuts])[:, 0]
                fit[-1] = True
        if not fit.any():
            return []
        dp, layers = dp[fit], layers[:, fit]
        formula_s = self._formula_s(layers, dp)
        return [
            _Choice(
                float(formula_s[c]),
                ParallelSpec(self.tp, pp, int(dp[c])),
                {s.module: tuple(layers[m, c].tolist()) for m, s in enumerate(self.specs)},
                self.recompute,
            )
            for c in range(len(dp))
        ]

    def _layers(self, cuts: Sequence[Cuts]) -> Ints:
        """`[modules, C, pp]` layers per stage of C cuts."""
        return np.diff(self._layers_before()[:, np.array(cuts)], axis=2)

    def _layers_before(self) -> Ints:
        """`[modules, units + 1]`."""
        return np.pad(np.cumsum(self.unit_layers, axis=1), ((0, 0), (1, 0)))

    def _unit_seconds(self, dp: Ints) -> list[tuple[float, ...]]:
        """Per number of replicas, seconds of every unit on a typical microbatch."""
        power = nearest_power(self.num_microbatches * dp)
        powers, which = np.unique(power, return_inverse=True)
        total = np.zeros((len(powers), self.unit_layers.shape[1]))
        for m, spec in enumerate(self.specs):
            load = self.problem.sample_loads[spec.module].typical(2**powers)
            layer_s, edge_s = self._seconds(spec, load)
            _, edge = ends_and_edge(self.unit_layers[m])
            total += self.unit_layers[m] * layer_s[:, np.newaxis] + edge * edge_s[:, np.newaxis]
        every = [tuple(row) for row in total.tolist()]
        return [every[k] for k in which]

    def _seconds(self, spec: ModuleSpec, load: Floats) -> tuple[Floats, Floats]:
        return layer_and_edge_seconds(self.problem.cost, spec.module, load, tp=self.tp, recompute=self.recompute)

    def _stage_bytes(self, layers: Ints, dp: Ints) -> StageBytes:
        """Of C chains: `layers` is `[modules, C, P]`."""
        parts = [
            stage_bytes(
                spec,
                self.problem.cost,
                layers[m],
                self.problem.sample_loads[spec.module].largest(self.num_microbatches * dp),
                tp=self.tp,
                dp=dp,
                recompute=self.recompute,
                shard_optimizer=self._shards(dp),
            )
            for m, spec in enumerate(self.specs)
        ]
        return functools.reduce(operator.add, parts)

    def _fit(self, layers: Ints, dp: Ints) -> Bools:
        pp = layers.shape[2]
        peaks = self._stage_bytes(layers, dp).peaks(in_flight(pp, self.num_microbatches, 0, pp))
        return np.asarray((peaks <= self.problem.usable_bytes).all(axis=1))

    def _cuts_within_memory(self, pp: int, dp: int) -> Cuts | None:
        """The fastest cuts of which every stage fits."""
        num_units = self.unit_layers.shape[1]
        start, end = np.triu_indices(num_units + 1, k=1)
        before = self._layers_before()
        # What lies before and behind a stage decides whether it holds a module's ends.
        around = np.stack(
            [before[:, start], before[:, end] - before[:, start], before[:, -1:] - before[:, end]], axis=2
        )
        held = self._stage_bytes(around, np.array([dp]))
        state, kept, once = (part[:, 1] for part in (held.state, held.kept, held.once))
        allowed = np.zeros((pp, num_units + 1, num_units + 1), dtype=bool)
        for stage in range(pp):
            peaks = state + min(self.num_microbatches, pp - stage) * kept + once
            allowed[stage, start, end] = peaks <= self.problem.usable_bytes
        (unit_s,) = self._unit_seconds(np.array([dp]))
        return best_cuts(np.array(unit_s), pp, allowed)

    def _formula_s(self, layers: Ints, dp: Ints) -> Floats:
        """`[C]`: J of C chains."""
        average_s: Floats = np.zeros(())
        heaviest_s: Floats = np.zeros(())
        for m, spec in enumerate(self.specs):
            load = self.problem.sample_loads[spec.module].per_microbatch(self.num_microbatches * dp)
            layer_s, edge_s = (part.T[:, :, np.newaxis] for part in self._seconds(spec, load))
            _, edge = ends_and_edge(layers[m])
            average_s = average_s + layers[m] * layer_s + edge * edge_s
            heavy_layer_s, heavy_edge_s = (part[:, :, np.newaxis] for part in self.heaviest_s[m])
            heaviest_s = heaviest_s + layers[m] * heavy_layer_s + edge * heavy_edge_s
        tau_s, fill_s = average_s.max(axis=2), np.maximum(average_s, heaviest_s).sum(axis=2)
        steps_s: Floats = (fill_s + (self.num_microbatches - 1) * tau_s).mean(axis=0)
        return steps_s + chain_sync_s(
            self.problem,
            self.specs,
            layers,
            tp=self.tp,
            dp=dp,
            recompute=self.recompute,
            shard_optimizer=self._shards(dp),
        )

    def _shards(self, dp: Ints) -> Bools:
        return self.problem.space.shard_optimizer & (dp > 1)
