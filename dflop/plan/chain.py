"""One chain of stages that holds all modules: how its layers are cut, what it takes and what it keeps.

A sample and its media stay together, so a unit of work is a sample.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import MAX_PP, Bools, layer_and_edge_seconds, nearest_power, shard_choices
from dflop.plan.memory import StageBytes, in_flight, stage_bytes
from dflop.plan.partition import Cuts, best_cuts, free_cuts
from dflop.plan.space import Problem
from dflop.plan.stage_params import first_and_last
from dflop.plan.sync import chain_sync_s, gather_seconds
from dflop.records import ModuleSpec, ParallelSpec
from dflop.schedule.items import Ints


@dataclass(frozen=True, slots=True)
class ChainChoice:
    """A chain on a grid."""

    formula_s: float
    parallel: ParallelSpec
    layers: dict[str, tuple[int, ...]]
    """Per module and stage."""
    recompute: bool
    parameter_shards: int


@dataclass(frozen=True, slots=True)
class Chain:
    """All modules one behind the other at one tp, one way of running and one number of microbatches."""

    problem: Problem
    tp: int
    recompute: bool
    num_microbatches: int
    unit_layers: Ints
    """`[modules, units]`: what can be cut off. One layer, or the layers of a module that must stay on one stage."""
    unit_s: tuple[tuple[float, ...], ...]
    """Seconds of every unit at the typical load of 1, 2, 4, ... buckets."""
    heaviest_s: tuple[tuple[Floats, Floats], ...]
    """Per module (layer, edge) seconds `[S, 1]` of the heaviest sample of each scenario."""

    @classmethod
    def of(cls, problem: Problem, tp: int, recompute: bool, num_microbatches: int) -> Chain:
        sizes = [_unit_sizes(spec) for spec in problem.specs]
        owner = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes])
        unit_layers = (owner == np.arange(len(sizes))[:, np.newaxis]) * np.concatenate(sizes)
        buckets = 2 ** np.arange(int(nearest_power(problem.global_batch_size)) + 1)
        unit_s, heaviest_s = np.zeros((len(buckets), len(owner))), []
        for m, spec in enumerate(problem.specs):
            seconds = functools.partial(layer_and_edge_seconds, problem.cost, spec.module, tp=tp, recompute=recompute)
            layer_s, edge_s = (
                part[:, np.newaxis] for part in seconds(problem.sample_loads[spec.module].typical(buckets))
            )
            _, edge = first_and_last(unit_layers[m])
            unit_s += unit_layers[m] * layer_s + edge * edge_s
            heavy_layer_s, heavy_edge_s = seconds(problem.heaviest_samples[spec.module])
            heaviest_s.append((heavy_layer_s[:, np.newaxis], heavy_edge_s[:, np.newaxis]))
        rows = tuple(tuple(row) for row in unit_s.tolist())
        return cls(problem, tp, recompute, num_microbatches, unit_layers, rows, tuple(heaviest_s))

    @property
    def specs(self) -> tuple[ModuleSpec, ...]:
        return self.problem.specs

    @property
    def max_pp(self) -> int:
        """A module that can be cut at all limits the whole chain, which is safe: it never spans more stages."""
        limits = [s.max_pp for s in self.specs if s.max_pp > 1]
        return min([MAX_PP, self.problem.cluster.num_processes // self.tp, int(self.unit_layers.shape[1]), *limits])

    def choices(
        self, pp: int, kind: int = 0, *, without: Collection[int] = (), limit_s: float = math.inf
    ) -> tuple[list[ChainChoice], ChainChoice | None]:
        """Chains of `pp` stages cut by time.

        Args:
            pp: Stages.
            kind: How parameters are shared out, an index into `shard_choices`.
            without: Numbers of replicas to leave out.
            limit_s: Formula value of what is worth a look.

        Returns:
            The choices that fit, and the one with the most replicas, which needs the least memory, if none does.
        """
        cluster, batch = self.problem.cluster, self.problem.global_batch_size
        most = min(batch // self.num_microbatches, cluster.num_processes // (self.tp * pp))
        dp = np.array([d for d in self.problem.dps(most) if d not in without], dtype=np.int64)
        shards = shard_choices(self.problem, self.tp, dp)[kind]
        dp, shards = dp[shards > 0], shards[shards > 0]
        if not len(dp):
            return [], None
        layers = self._layers([free_cuts(self.unit_s[k], pp) for k in nearest_power(self.num_microbatches * dp)])
        found = self._choices(layers, dp, shards)
        near = np.array([choice.formula_s <= limit_s for choice in found])
        if not near.any():
            return [], None
        found = list(itertools.compress(found, near))
        fit = self._fit(layers[:, near], dp[near], shards[near])
        return (list(itertools.compress(found, fit)), None) if fit.any() else ([], found[-1])

    def within_memory(self, choice: ChainChoice) -> ChainChoice | None:
        """The fastest cuts of a chain of which every stage fits; None when there are none."""
        pp, dp, shards = choice.parallel.pp, np.array([choice.parallel.dp]), np.array([choice.parameter_shards])
        num_units = self.unit_layers.shape[1]
        start, end = np.triu_indices(num_units + 1, k=1)
        before = self._layers_before()
        # What lies before and behind a stage decides whether it holds a module's ends.
        around = np.stack(
            [before[:, start], before[:, end] - before[:, start], before[:, -1:] - before[:, end]], axis=2
        )
        held = self._stage_bytes(around, dp, shards)
        between = StageBytes(*(getattr(held, field.name)[:, 1] for field in fields(held)))
        allowed = np.zeros((pp, num_units + 1, num_units + 1), dtype=bool)
        for stage in range(pp):
            peaks = between.peaks(min(self.num_microbatches, pp - stage))
            allowed[stage, start, end] = peaks <= self.problem.usable_bytes
        power = int(nearest_power(self.num_microbatches * dp)[0])
        cuts = best_cuts(np.array(self.unit_s[power]), pp, allowed)
        return None if cuts is None else self._choices(self._layers([cuts]), dp, shards)[0]

    def _choices(self, layers: Ints, dp: Ints, shards: Ints) -> list[ChainChoice]:
        names = [s.module for s in self.specs]
        return [
            ChainChoice(
                formula_s,
                ParallelSpec(self.tp, layers.shape[2], replicas),
                {name: tuple(stages) for name, stages in zip(names, of_choice, strict=True)},
                self.recompute,
                group,
            )
            for formula_s, replicas, group, of_choice in zip(
                self._formula_s(layers, dp, shards).tolist(),
                dp.tolist(),
                shards.tolist(),
                layers.swapaxes(0, 1).tolist(),
                strict=True,
            )
        ]

    def _layers(self, cuts: Sequence[Cuts]) -> Ints:
        """`[modules, C, pp]` layers per stage of C cuts."""
        return np.diff(self._layers_before()[:, np.array(cuts)], axis=2)

    def _layers_before(self) -> Ints:
        """`[modules, units + 1]`."""
        return np.pad(np.cumsum(self.unit_layers, axis=1), ((0, 0), (1, 0)))

    def _seconds(self, spec: ModuleSpec, load: Floats) -> tuple[Floats, Floats]:
        return layer_and_edge_seconds(self.problem.cost, spec.module, load, tp=self.tp, recompute=self.recompute)

    def _stage_bytes(self, layers: Ints, dp: Ints, shards: Ints) -> StageBytes:
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
                shards=shards,
            )
            for m, spec in enumerate(self.specs)
        ]
        return functools.reduce(operator.add, parts)

    def _fit(self, layers: Ints, dp: Ints, shards: Ints) -> Bools:
        pp = layers.shape[2]
        peaks = self._stage_bytes(layers, dp, shards).peaks(in_flight(pp, self.num_microbatches, 0, pp))
        return np.asarray((peaks <= self.problem.usable_bytes).all(axis=1))

    def _formula_s(self, layers: Ints, dp: Ints, shards: Ints) -> Floats:
        """`[C]`: J of C chains; weights are gathered behind the computing that they are gathered for."""
        average_s: Floats = np.zeros(())
        heaviest_s: Floats = np.zeros(())
        gathers_s: Floats = np.zeros(())
        for m, spec in enumerate(self.specs):
            load = self.problem.sample_loads[spec.module].per_microbatch(self.num_microbatches * dp)
            layer_s, edge_s = (part.T[:, :, np.newaxis] for part in self._seconds(spec, load))
            _, edge = first_and_last(layers[m])
            average_s = average_s + layers[m] * layer_s + edge * edge_s
            heavy_layer_s, heavy_edge_s = (part[:, :, np.newaxis] for part in self.heaviest_s[m])
            heaviest_s = heaviest_s + layers[m] * heavy_layer_s + edge * heavy_edge_s
            gather_s, scatter_s = gather_seconds(
                self.problem, spec, layers[m], tp=self.tp, dp=dp, recompute=self.recompute, shards=shards
            )
            gathers_s = gathers_s + 2 * gather_s + scatter_s
        average_s, heaviest_s = np.maximum(average_s, gathers_s), np.maximum(heaviest_s, gathers_s)
        if layers.shape[2] == 1:  # no fill: the scheduler puts less beside the heaviest sample
            step_s = np.maximum(self.num_microbatches * average_s, heaviest_s)[:, :, 0]
        else:
            fill_s = np.maximum(average_s, heaviest_s).sum(axis=2)
            step_s = fill_s + (self.num_microbatches - 1) * average_s.max(axis=2)
        steps_s: Floats = step_s.mean(axis=0)
        return steps_s + chain_sync_s(
            self.problem,
            self.specs,
            layers,
            tp=self.tp,
            dp=dp,
            recompute=self.recompute,
            shard_optimizer=self._shards(dp),
            shards=shards,
        )

    def _shards(self, dp: Ints) -> Bools:
        return self.problem.space.shard_optimizer & (dp > 1)


def _unit_sizes(spec: ModuleSpec) -> list[int]:
    """Layers of each unit of a module."""
    if spec.max_pp == 1:
        return [spec.num_layers]
    return [spec.num_entry_layers, *[1] * (spec.num_layers - spec.num_entry_layers)]
