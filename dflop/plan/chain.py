"""One chain of stages that holds all modules: how its layers are cut, what it takes and what it keeps.

A sample and its media stay together, so a unit of work is a sample.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.plan.candidates import MAX_PP, Bools, layer_and_edge_seconds, nearest_power, recompute_ways, shard_choices
from dflop.plan.chain_memory import ChainMemory
from dflop.plan.grid_choice import GridChoice, grid_choices
from dflop.plan.lock_step import together_s
from dflop.plan.memory import StageBytes
from dflop.plan.partition import ROUNDING, Cuts, best_cuts, free_cuts, range_seconds
from dflop.plan.space import Problem
from dflop.plan.stage_params import first_and_last
from dflop.plan.sync import chain_sync_s, gather_seconds
from dflop.records import ModuleSpec
from dflop.schedule.items import Ints


@dataclass(frozen=True)
class Chain:
    """All modules one behind the other at one tp, one cp and one number of microbatches.

    The first layers of a stage run again in the backward pass, as few as its memory asks for.
    """

    problem: Problem
    tp: int
    cp: int
    ways: tuple[bool, ...]
    """Whether layers may keep their activations, and whether they may run again."""
    num_microbatches: int
    unit_layers: Ints
    """`[modules, units]`: what can be cut off. One layer, or the layers of a module that must stay on one stage."""
    unit_s: tuple[tuple[float, ...], ...]
    """Seconds of every unit at the typical load of 1, 2, 4, ... buckets."""
    again_s: Floats
    """`[modules, powers]` what a layer takes longer at these loads when it runs again."""
    heaviest_s: tuple[tuple[Floats, Floats, Floats], ...]
    """Per module (layer, edge, layer again) seconds `[S, 1]` of the heaviest sample of each scenario."""
    average_s: tuple[tuple[Floats, Floats, Floats], ...]
    """The same `[D, S]` of an average microbatch, by number of groups as `least_s` has them."""
    least_s: dict[int, float]
    """By number of groups, ascending: what all microbatches of one take at least, however it is cut or run again."""

    @classmethod
    def of(cls, problem: Problem, tp: int, num_microbatches: int, cp: int = 1) -> Chain:
        ways = set.intersection(*(set(recompute_ways(problem, spec.module, tp)) for spec in problem.specs))
        sizes = [_unit_sizes(spec) for spec in problem.specs]
        owner = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes])
        unit_layers = (owner == np.arange(len(sizes))[:, np.newaxis]) * np.concatenate(sizes)
        buckets = 2 ** np.arange(int(nearest_power(problem.global_batch_size)) + 1)
        most = problem.cluster.num_processes // (tp * cp)
        dp = problem.dps(min(problem.global_batch_size // num_microbatches, most))
        least_s = np.zeros(len(dp))
        unit_s, again_s, heaviest_s, averages_s = np.zeros((len(buckets), len(owner))), [], [], []
        for m, spec in enumerate(problem.specs):
            seconds = functools.partial(_seconds, problem.cost, spec.module, tp=tp, cp=cp, again=True in ways)
            layer_s, edge_s, of_again_s = seconds(problem.sample_loads[spec.module].typical(buckets))
            again_s.append(of_again_s)
            _, edge = first_and_last(unit_layers[m])
            unit_s += unit_layers[m] * layer_s[:, np.newaxis] + edge * edge_s[:, np.newaxis]
            heavy_s, heavy_edge_s, heavy_again_s = seconds(problem.heaviest_samples[spec.module])
            heaviest_s.append((heavy_s[:, np.newaxis], heavy_edge_s[:, np.newaxis], heavy_again_s[:, np.newaxis]))
            average = problem.sample_loads[spec.module].per_microbatch(num_microbatches * np.array(dp))
            averages_s.append(seconds(average))
            least_s += num_microbatches * (spec.num_layers * averages_s[-1][0] + averages_s[-1][1]).mean(axis=-1)
        rows = tuple(tuple(row) for row in unit_s.tolist())
        return cls(
            problem,
            tp,
            cp,
            tuple(sorted(ways)),
            num_microbatches,
            unit_layers,
            rows,
            np.array(again_s),
            tuple(heaviest_s),
            tuple(averages_s),
            dict(zip(dp, least_s.tolist(), strict=True)),
        )

    @property
    def specs(self) -> tuple[ModuleSpec, ...]:
        return self.problem.specs

    @property
    def max_pp(self) -> int:
        """A module that can be cut at all limits the whole chain, which is safe: it never spans more stages."""
        limits = [s.max_pp for s in self.specs if s.max_pp > 1]
        most = self.problem.cluster.num_processes // (self.tp * self.cp)
        return min([MAX_PP, most, int(self.unit_layers.shape[1]), *limits])

    @functools.cached_property
    def memory(self) -> ChainMemory:
        """What chains like this keep."""
        of = self.tp, self.cp, self.ways, self.num_microbatches, tuple(self.least_s)
        return ChainMemory(self.problem, self.specs, *of, self.unit_layers.sum(axis=1), self.again_s)

    def _dps(self, pp: int) -> Ints:
        cluster, batch = self.problem.cluster, self.problem.global_batch_size
        most = min(batch // self.num_microbatches, cluster.num_processes // (self.tp * self.cp * pp))
        return np.array(self.problem.dps(most), dtype=np.int64)

    def _at_least_s(self, pp: int, dp: Ints) -> Floats:
        """`[C]`: no chains of `pp` stages take less; a microbatch crosses all of them, and the rest the slowest one."""
        num, total_s = self.num_microbatches, np.array([self.least_s[d] for d in dp.tolist()])
        found: Floats = total_s / num * (1 + (num - 1) / pp) / ROUNDING
        return found

    def at_least_s(self, pp: int) -> float:
        """No chain of `pp` stages takes less; infinite where there is none."""
        return float(self._at_least_s(pp, self._dps(pp)).min(initial=math.inf))

    def choices(
        self, pp: int, kind: int = 0, *, without: Collection[int] = (), limit_s: float = math.inf
    ) -> tuple[list[GridChoice], GridChoice | None]:
        """Chains of `pp` stages cut by time.

        Args:
            pp: Stages.
            kind: How parameters are shared out, an index into `shard_choices`.
            without: Numbers of groups to leave out.
            limit_s: Formula value of what is worth a look.

        Returns:
            The choices that fit, and, where that with the most groups fits only with layers that run again, or does
            not fit, that choice: other cuts may be faster. Its formula value is without such layers if it fits with.
        """
        dp = self._dps(pp)
        shards = shard_choices(self.problem, self.tp, dp * self.cp)[kind]
        worth = (shards > 0) & ~np.isin(dp, list(without)) & (self._at_least_s(pp, dp) <= limit_s)
        worth &= self.memory.whole_bytes[kind, : len(dp)] <= pp * self.problem.usable_bytes
        dp, shards = dp[worth], shards[worth]
        if not len(dp):
            return [], None
        layers = self._layers([free_cuts(self.unit_s[k], pp) for k in nearest_power(self.num_microbatches * dp)])
        # Layers that run again only make it slower.
        plain_s = self._formula_s(layers, np.zeros_like(layers), dp, shards)
        near = plain_s <= limit_s
        if not near.any():
            return [], None
        layers, dp, shards, plain_s = layers[:, near], dp[near], shards[near], plain_s[near]
        again, fit = self.memory.recomputed(layers, dp, shards)
        does: Bools = np.asarray(again.any(axis=(0, 2)))
        step_s = plain_s.copy()
        if does.any():
            some = layers[:, does], again[:, does], dp[does], shards[does]
            step_s[does] = self._formula_s(*some, self.memory.usual(*some))
        found = self._choices(layers, again, dp, shards, step_s)
        if not fit.any():
            return [], found[-1]
        uneven = None
        if pp > 1 and does[-1]:
            uneven = self._choices(layers[:, -1:], 0 * again[:, -1:], dp[-1:], shards[-1:], plain_s[-1:])[0]
        every = fit & does & (again < layers).any(axis=(0, 2))
        if self.memory.per_microbatch or not every.any():
            return list(itertools.compress(found, fit)), uneven
        # Where memory is full the scheduler has no choice left, so the same chains with all layers recomputed are kept.
        own, states = layers[:, every], self.memory.states(layers[:, every], dp[every], shards[every])
        every[every] = ~self.memory.is_over(self.memory.held(states, own, own, dp[every])).any(axis=1)
        if not every.any():
            return list(itertools.compress(found, fit)), uneven
        of_every = layers[:, every], layers[:, every], dp[every], shards[every]
        roomy = self._choices(*of_every, self._formula_s(*of_every))
        return [*itertools.compress(found, fit), *roomy], uneven

    def within_memory(self, choice: GridChoice) -> GridChoice | None:
        """The fastest cuts of a chain of which every stage fits; None when there are none."""
        pp, dp, shards = choice.parallel.pp, np.array([choice.parallel.dp]), np.array([choice.parameter_shards])
        num_units = self.unit_layers.shape[1]
        start, end = np.triu_indices(num_units + 1, k=1)
        before = self._layers_before()
        # What lies before and behind a stage decides whether it holds a module's ends.
        around = np.stack(
            [before[:, start], before[:, end] - before[:, start], before[:, -1:] - before[:, end]], axis=2
        )
        held = self.memory.held(self.memory.states(around, dp, shards), around, np.zeros_like(around), dp)
        has_room = held.state[:, 1] <= self.problem.usable_bytes
        power = int(nearest_power(self.num_microbatches * dp)[0])
        plain_s = range_seconds(self.unit_s[power])
        stage_s = np.full((pp, num_units + 1, num_units + 1), np.inf)
        for stage in range(pp):
            depth = self.memory.depth(pp)[stage : stage + 1]
            is_own = ((start == 0) == (stage == 0)) & ((end == num_units) == (stage == pp - 1)) & (start >= stage)
            rows = np.flatnonzero(has_room & is_own & (num_units - end >= pp - 1 - stage))
            between = StageBytes(*(getattr(held, field.name)[rows, 1:2] for field in fields(held)))
            own = around[:, rows, 1:2]
            again, is_enough = self.memory.least(between, own, depth, dp)
            again = again - self.memory.offloaded(own, again, depth, dp)
            longer_s = np.tensordot(self.again_s[:, power], again[:, :, 0], 1)
            of_rows = (stage, start[rows], end[rows])
            stage_s[of_rows] = np.where(is_enough[:, 0], plain_s[of_rows[1:]] + longer_s, np.inf)
            if not is_enough.any():
                return None
        cuts = best_cuts(stage_s)
        if cuts is None:
            return None
        layers = self._layers([cuts])
        again, fit = self.memory.recomputed(layers, dp, shards)
        made = layers, again, dp, shards
        return self._choices(*made, self._formula_s(*made, self.memory.usual(*made)))[0] if fit[0] else None

    def _choices(self, layers: Ints, again: Ints, dp: Ints, shards: Ints, step_s: Floats) -> list[GridChoice]:
        sharing = self.problem.space.shard_optimizer
        made = layers, again, dp, shards, step_s
        return grid_choices(self.specs, self.tp, self.cp, *made, shard_optimizer=sharing)

    def _layers(self, cuts: Sequence[Cuts]) -> Ints:
        """`[modules, C, pp]` layers per stage of C cuts."""
        return np.diff(self._layers_before()[:, np.array(cuts)], axis=2)

    def _layers_before(self) -> Ints:
        """`[modules, units + 1]`."""
        return np.pad(np.cumsum(self.unit_layers, axis=1), ((0, 0), (1, 0)))

    def _formula_s(self, layers: Ints, again: Ints, dp: Ints, shards: Ints, usual: Ints | None = None) -> Floats:
        """`[C]`: J of C chains; weights are gathered behind the computing that they are gathered for.

        `usual`: as `again`, in an average microbatch.
        """
        average_s: Floats = np.zeros(())
        heaviest_s: Floats = np.zeros(())
        gathers_s: Floats = np.zeros(())
        plain_s: Floats = np.zeros(())
        which, pp = self.memory.which(dp), layers.shape[2]
        again = again - self.memory.offloaded(layers, again, self.memory.depth(pp), dp)
        usual = again if usual is None or self.problem.space.host_bytes else usual
        for m, spec in enumerate(self.specs):
            layer_s, edge_s, again_s = (part[which].T[:, :, np.newaxis] for part in self.average_s[m])
            _, edge = first_and_last(layers[m])
            average_s = average_s + layers[m] * layer_s + edge * edge_s + usual[m] * again_s
            heavy_s, heavy_edge_s, heavy_again_s = (part[:, :, np.newaxis] for part in self.heaviest_s[m])
            heaviest_s = heaviest_s + layers[m] * heavy_s + edge * heavy_edge_s + again[m] * heavy_again_s
            gather_s, scatter_s = gather_seconds(
                self.problem, spec, layers[m], tp=self.tp, replicas=dp * self.cp, shards=shards
            )
            gathers_s = gathers_s + 2 * gather_s + scatter_s
            plain_s = plain_s + layers[m] * layer_s + edge * edge_s
        average_s, heaviest_s = np.maximum(average_s, gathers_s), np.maximum(heaviest_s, gathers_s)
        if pp == 1:  # no fill: the scheduler packs less with the heaviest sample
            step_s = np.maximum(self.num_microbatches * average_s, heaviest_s)[:, :, 0]
            for c in np.flatnonzero(shards > 1):
                cells = self.num_microbatches, int(dp[c])
                step_s[:, c] = together_s(self.problem, self.tp, self.cp, *cells, average_s[:, c, 0], plain_s[:, c, 0])
        else:
            fill_s = np.maximum(average_s, heaviest_s).sum(axis=2)
            step_s = fill_s + (self.num_microbatches - 1) * average_s.max(axis=2)
        steps_s: Floats = step_s.mean(axis=0)
        return steps_s + chain_sync_s(
            self.problem,
            self.specs,
            layers,
            usual,
            self.num_microbatches,
            tp=self.tp,
            cp=self.cp,
            dp=dp,
            shard_optimizer=self.memory.shares_optimizer(dp),
            shards=shards,
        )


def _seconds(
    cost: CostModel, module: str, load: Floats, *, tp: int, cp: int, again: bool
) -> tuple[Floats, Floats, Floats]:
    """(one layer, the edge, what a layer that runs again takes longer), forward and backward, on loads `[3, ...]`."""
    layer_s, edge_s = layer_and_edge_seconds(cost, module, load, tp=tp, cp=cp, recompute=False)
    if not again:
        return layer_s, edge_s, np.zeros_like(layer_s)
    return layer_s, edge_s, layer_and_edge_seconds(cost, module, load, tp=tp, cp=cp, recompute=True)[0] - layer_s


def _unit_sizes(spec: ModuleSpec) -> list[int]:
    """Layers of each unit of a module."""
    if spec.max_pp == 1:
        return [spec.num_layers]
    return [spec.num_entry_layers, *[1] * (spec.num_layers - spec.num_entry_layers)]
