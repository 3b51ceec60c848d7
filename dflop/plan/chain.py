"""One chain of stages that holds some of the modules: how its layers are cut, what it takes and what it keeps.

With the LLM a sample and its media stay together, so a unit of work is a sample; without it a media item is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import MAX_PP, NUM_SHARD_CHOICES, Bools, nearest_power, recompute_ways, shard_choices
from dflop.plan.chain_memory import ChainMemory
from dflop.plan.grid_choice import Grids
from dflop.plan.memory import StageBytes, StageState, max_stages_beyond
from dflop.plan.partition import ROUNDING, best_cuts, free_cuts, range_seconds, unit_layers_of
from dflop.plan.space import Problem
from dflop.plan.stage_params import StageParams, chain_params, first_and_last
from dflop.plan.sync import chain_sync_s, gather_seconds
from dflop.plan.unit_seconds import together_s, unit_seconds
from dflop.records import LLM, ModuleSpec, RunMode
from dflop.schedule.items import Ints
from dflop.simulate.step import with_messages

Cut = tuple[Grids, list[StageState]]
"""Grids that recompute nothing, and what their stages hold of each module."""


@dataclass(frozen=True)
class Chain:
    """Modules one behind the other at one tp, one cp and one number of microbatches.

    The first layers of a stage run again in the backward pass, as few as its memory asks for.
    """

    problem: Problem
    specs: tuple[ModuleSpec, ...]
    """Specs of the chain's modules."""
    most_processes: int
    """Processes that other modules leave free."""
    mode: RunMode
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
    """Per module (layer, edge, layer again) seconds `[S, 1]` of the heaviest unit of work of each scenario."""
    average_s: tuple[tuple[Floats, Floats, Floats], ...]
    """The same `[D, S]` of an average microbatch, by number of groups as `least_s` has them."""
    least_s: dict[int, float]
    """By number of groups, ascending: what all microbatches of one take at least, however it is cut or run again."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        tp: int,
        num_microbatches: int,
        cp: int = 1,
        modules: Collection[str] = (),
        most_processes: int = 0,
        ep: int = 1,
    ) -> Chain:
        """A chain of some of a problem's modules, none: all; without `most_processes` it leaves one for each other."""
        specs = tuple(spec for spec in problem.specs if not modules or spec.module in modules)
        most_processes = most_processes or problem.cluster.num_processes - len(problem.specs) + len(specs)
        ways = set.intersection(*(set(recompute_ways(problem, spec.module, tp)) for spec in specs))
        unit_layers, with_llm = unit_layers_of(specs, len(problem.specs)), specs[-1].module == LLM
        max_dp = problem.global_batch_size // (num_microbatches if with_llm else 1)
        dp, mode = problem.dps(min(max_dp, most_processes // (tp * cp))), RunMode(tp, cp, ep=ep)
        powers = np.arange(int(nearest_power(num_microbatches * max(dp, default=1))) + 1)
        num_buckets, least_s = num_microbatches * np.array(dp, dtype=np.int64), np.zeros(len(dp))
        unit_s, again_s, heaviest_s, averages_s = np.zeros((len(powers), unit_layers.shape[1])), [], [], []
        for m, spec in enumerate(specs):
            known = unit_seconds(problem, specs, spec.module, mode, again=True in ways)
            layer_s, edge_s, of_again_s = (part[powers] for part in known.typical_s)
            again_s.append(of_again_s)
            _, edge = first_and_last(unit_layers[m])
            unit_s += unit_layers[m] * layer_s[:, np.newaxis] + edge * edge_s[:, np.newaxis]
            heavy_s, heavy_edge_s, heavy_again_s = (part[:, np.newaxis] for part in known.heaviest_s)
            heaviest_s.append((heavy_s, heavy_edge_s, heavy_again_s))
            which = np.minimum(num_buckets, len(known.average_s[0])) - 1
            average_s, average_edge_s, average_again_s = (part[which] for part in known.average_s)
            averages_s.append((average_s, average_edge_s, average_again_s))
            least_s += num_microbatches * (spec.num_layers * average_s + average_edge_s).mean(axis=-1)
        rows = tuple(tuple(row) for row in unit_s.tolist())
        return cls(
            problem,
            specs,
            most_processes,
            mode,
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
    def with_llm(self) -> bool:
        return self.specs[-1].module == LLM

    @property
    def max_pp(self) -> int:
        """A module that can be cut at all limits the whole chain, which is safe: it never spans more stages."""
        limits = [s.max_pp for s in self.specs if s.max_pp > 1]
        most = self.most_processes // (self.mode.tp * self.mode.cp)
        return min([MAX_PP, most, int(self.unit_layers.shape[1]), *limits])

    @functools.cached_property
    def memory(self) -> ChainMemory:
        """What chains like this keep."""
        of = self.mode, self.ways, self.num_microbatches, tuple(self.least_s)
        return ChainMemory(self.problem, self.specs, *of, self.unit_layers.sum(axis=1), self.again_s)

    def _dps(self, pp: int) -> Ints:
        most = self.most_processes // (self.mode.tp * self.mode.cp * pp)
        return np.array([dp for dp in self.least_s if dp <= most], dtype=np.int64)

    def _at_least_s(self, pp: int, dp: Ints) -> Floats:
        """`[C]`: no chains of `pp` stages take less; a microbatch crosses all of them, and the rest the slowest one."""
        num, total_s = self.num_microbatches, np.array([self.least_s[d] for d in dp.tolist()])
        first_s = total_s / num if pp == 1 else np.maximum(total_s / num, self._heaviest_s)
        found: Floats = (first_s + total_s / num * (num - 1) / pp) / ROUNDING
        return found

    @functools.cached_property
    def _heaviest_s(self) -> float:
        """What the heaviest unit of work takes at least, mean over scenarios."""
        parts = zip(self.specs, self.heaviest_s, strict=True)
        return sum(float((spec.num_layers * layer_s + edge_s).mean()) for spec, (layer_s, edge_s, _) in parts)

    def at_least_s(self, pp: int) -> float:
        """No chain of `pp` stages that memory may hold takes less; infinite where there is none."""
        dp = self._dps(pp)
        may_fit = (self.memory.whole_bytes[:, : len(dp)] <= pp * self.problem.usable_bytes).any(axis=0)
        return float(self._at_least_s(pp, dp[may_fit]).min(initial=math.inf))

    def cuts(self, pp: int, limit_s: float = math.inf) -> list[Cut]:
        """Grids of `pp` stages with the LLM, cut by time, that recompute nothing: per way to share out parameters."""
        dp = self._dps(pp)
        worth = self._at_least_s(pp, dp) <= limit_s
        worth = worth & (self.memory.whole_bytes[:, : len(dp)] <= pp * self.problem.usable_bytes)
        return self._cut_by_time(pp, dp, worth, limit_s)

    def choices(
        self, cut: Cut, *, without: Collection[int] = (), limit_s: float = math.inf
    ) -> tuple[list[Grids], Grids | None]:
        """Grids of one of `cuts` that fit, with layers that run again where it takes them.

        Args:
            cut: One way to share out parameters.
            without: Numbers of groups to leave out.
            limit_s: Formula value of what is worth a look.

        Returns:
            Those that fit, and, where that with the most groups fits only with layers that run again, or does not fit,
            that one: other cuts may be faster. Its formula value is without such layers if it fits with.
        """
        plain, states = _select(cut, ~np.isin(cut[0].dp, list(without)) & (cut[0].alone_s <= limit_s))
        if not len(plain):
            return [], None
        # Layers that run again only make it slower.
        again, fit = self.memory.recomputed(plain.layers, states, plain.dp)
        does: Bools = np.asarray(again.any(axis=(0, 2)))
        found = plain.put(does, self._again(plain, states, again, does)) if does.any() else plain
        if not fit.any():
            return [], found.select(slice(-1, None))
        uneven = plain.select(slice(-1, None)) if plain.pp > 1 and does[-1] else None
        fitting = [found.select(fit)]
        some = fit & does & (again < plain.layers).any(axis=(0, 2))
        if self.memory.per_microbatch:
            return fitting, uneven
        if some.any():
            # Where memory is full the scheduler has no choice left, so the same with all layers recomputed are kept.
            own, dp = plain.layers[:, some], plain.dp[some]
            held = self.memory.held([of.select(some) for of in states], own, own, dp)
            some[some] = ~self.memory.is_over(held).any(axis=1)
        if some.any():
            fitting.append(self._again(plain, states, plain.layers, some))
        return fitting, uneven

    def in_front(self, pp: int, limit_s: float = math.inf) -> list[Grids]:
        """Grids of `pp` stages of encoders, cut by time, that fit in front of some LLM.

        One that recomputes or shares out parameters is kept where the same that does less of it has to stand in front
        of a less deep LLM, or does not fit at all; else it is slower for nothing.
        """
        dp, found = self._dps(pp), []
        deepest = {way: np.zeros(len(dp)) for way in (False, True)}
        for plain, states in self._cut_by_time(pp, dp, np.ones((NUM_SHARD_CHOICES, len(dp)), dtype=np.bool_), limit_s):
            rows = np.searchsorted(dp, plain.dp)
            for way in self.ways:
                held = self.memory.held(states, plain.layers, plain.layers * way, plain.dp)
                depths = np.full(len(plain), pp)
                limits = {"num_microbatches": self.num_microbatches, "usable_bytes": self.problem.usable_bytes}
                depth = max_stages_beyond(held, depths, **limits)
                needed = depth > deepest[way][rows]
                deepest[way][rows] = np.maximum(deepest[way][rows], depth)
                if not way:
                    deepest[True][rows] = np.maximum(deepest[True][rows], depth)
                if needed.any():
                    of_way = self._again(plain, states, plain.layers * way, needed)
                    found.append(dataclasses.replace(of_way, max_llm_pp=depth[needed]))
        return found

    def _cut_by_time(self, pp: int, dp: Ints, worth: Bools, limit_s: float) -> list[Cut]:
        """Per way to share out parameters grids that recompute nothing and take no longer than a limit by themselves.

        Gathers, sums and the optimizer are computed only where passes keep to the limit; `worth` `[ways, dp]` says what
        is looked at.
        """
        shards = np.array(shard_choices(self.problem, self.mode, dp))
        kind, which = np.nonzero(worth & (shards > 0))
        if not len(kind):
            return []
        dp, shards = dp[which], shards[kind, which]
        powers = nearest_power(self.num_microbatches * dp)
        layers = self._layers(np.array([free_cuts(self.unit_s[k], pp) for k in powers]))
        none, params = np.zeros_like(layers), chain_params(self.specs, layers, self.mode)
        tau_s, fill_s = self._pass_terms(params, none, none, dp, shards)
        near = self._passes_s(tau_s, fill_s) <= limit_s
        if not near.any():
            return []
        params = [of.select(near) for of in params]
        layers, none, dp, shards, kind = layers[:, near], none[:, near], dp[near], shards[near], kind[near]
        found = self._with_sync(params, layers, none, none, dp, shards, tau_s[:, near], fill_s[:, near])
        kind, states = np.where(found.alone_s <= limit_s, kind, -1), self.memory.states(params, dp, shards)
        return [_select((found, states), kind == k) for k in range(NUM_SHARD_CHOICES) if k in kind]

    def _again(self, plain: Grids, states: list[StageState], again: Ints, which: Bools) -> Grids:
        """Some of grids, with layers that run again."""
        some, own = _select((plain, states), which)
        return self._grids(own, some.layers, again[:, which], some.dp, some.shards)

    def _grids(self, states: Sequence[StageState], layers: Ints, again: Ints, dp: Ints, shards: Ints) -> Grids:
        """C grids; an average microbatch asks for no more layers to run again than it needs itself."""
        params, usual = [of.params for of in states], self.memory.usual(states, layers, again, dp)
        computed = again - self.memory.offloaded(layers, again, self.memory.depth(layers.shape[2]), dp)
        usual = computed if self.problem.space.host_bytes else usual
        terms = self._pass_terms(params, usual, computed, dp, shards)
        return self._with_sync(params, layers, again, usual, dp, shards, *terms)

    def _with_sync(
        self,
        params: Sequence[StageParams],
        layers: Ints,
        again: Ints,
        usual: Ints,
        dp: Ints,
        shards: Ints,
        tau_s: Floats,
        fill_s: Floats,
    ) -> Grids:
        """Grids of known passes; `usual` layers of an average microbatch run again."""
        shares = self.memory.shares_optimizer(dp)
        sync_s = chain_sync_s(
            self.problem,
            self.specs,
            params,
            usual,
            self.num_microbatches,
            self.mode,
            dp=dp,
            shard_optimizer=shares,
            shards=shards,
        )
        alone_s, beyond = self._passes_s(tau_s, fill_s) + sync_s, np.full(len(dp), np.inf)
        made = layers, again, dp, shards, tau_s, fill_s, sync_s, alone_s, beyond
        return Grids(self.specs, self.mode, self.problem.space.shard_optimizer, *made)

    def _passes_s(self, tau_s: Floats, fill_s: Floats) -> Floats:
        """`[C]`: seconds of the passes of a step, without gathers, sums and the optimizer."""
        return mean_s(fill_s + (self.num_microbatches - 1) * tau_s)

    def within_memory(self, choice: Grids) -> Grids | None:
        """The fastest cuts of one grid with the LLM of which every stage fits; None when there are none."""
        pp, dp, shards = choice.pp, choice.dp, choice.shards
        (start, end), around, kind = self._ranges
        num_units, num_kinds = self.unit_layers.shape[1], around.shape[1]
        states = self.memory.states(chain_params(self.specs, around, self.mode), dp, shards)
        held = self.memory.held(states, around, np.zeros_like(around), dp)
        between = StageBytes(*(getattr(held, field.name)[:, 1:2] for field in fields(held)))
        own = np.broadcast_to(around[:, :, 1:2], (len(self.specs), num_kinds, pp))
        depth = self.memory.depth(pp)
        again, is_enough = self.memory.least(between, own, depth, dp)
        again = again - self.memory.offloaded(own, again, depth, dp)
        is_enough &= between.state <= self.problem.usable_bytes
        power = int(nearest_power(self.num_microbatches * dp)[0])
        longer_s = np.where(is_enough, np.tensordot(self.again_s[:, power], again, 1), np.inf)
        plain_s = range_seconds(self.unit_s[power])
        stage_s = np.full((pp, num_units + 1, num_units + 1), np.inf)
        for stage in range(pp):
            is_own = ((start == 0) == (stage == 0)) & ((end == num_units) == (stage == pp - 1)) & (start >= stage)
            rows = np.flatnonzero(is_own & (num_units - end >= pp - 1 - stage))
            stage_s[stage, start[rows], end[rows]] = plain_s[start[rows], end[rows]] + longer_s[kind[rows], stage]
        cuts = best_cuts(stage_s)
        if cuts is None:
            return None
        layers = self._layers(np.array([cuts]))
        states = self.memory.states(chain_params(self.specs, layers, self.mode), dp, shards)
        again, fit = self.memory.recomputed(layers, states, dp)
        return self._grids(states, layers, again, dp, shards) if fit[0] else None

    @functools.cached_property
    def _ranges(self) -> tuple[tuple[Ints, Ints], Ints, Ints]:
        """((first unit, end) of every range, `[modules, kinds, 3]` layers before, in and behind one, kind of each).

        What lies before and behind a stage decides whether it holds a module's ends, and nothing else where layers are
        alike.
        """
        start, end = np.triu_indices(self.unit_layers.shape[1] + 1, k=1)
        before = self._layers_before
        around = np.stack([before[:, start], before[:, end] - before[:, start], before[:, -1:] - before[:, end]])
        for m, spec in enumerate(self.specs):
            if not spec.deep_layers and len(spec.kinds) == 1:
                around[::2, m] = np.minimum(around[::2, m], 1)
        digits = around.reshape(-1, len(start))
        _, first, kind = np.unique(
            np.ravel_multi_index(digits, digits.max(axis=1) + 1), return_index=True, return_inverse=True
        )
        return (start, end), around[:, :, first].transpose(1, 2, 0), kind

    def _layers(self, cuts: Ints) -> Ints:
        """`[modules, C, pp]` layers per stage of cuts `[C, pp + 1]`."""
        return np.diff(self._layers_before[:, cuts], axis=2)

    @functools.cached_property
    def _layers_before(self) -> Ints:
        """`[modules, units + 1]`."""
        return np.pad(np.cumsum(self.unit_layers, axis=1), ((0, 0), (1, 0)))

    def _pass_terms(
        self, params: Sequence[StageParams], usual: Ints, again: Ints, dp: Ints, shards: Ints
    ) -> tuple[Floats, Floats]:
        """(tau, fill) `[S, C]` of C chains, see `columns.py`.

        Gathers and scatters of shared weights are charged as `with_messages` does. Layers that run again are `usual` in
        an average microbatch, `again` in the heaviest.
        """
        average_s: Floats = np.zeros(())
        heaviest_s: Floats = np.zeros(())
        gathers_s: Floats = np.zeros(())
        plain_s: Floats = np.zeros(())
        which, num = self.memory.which(dp), self.num_microbatches
        for m, (spec, own) in enumerate(zip(self.specs, params, strict=True)):
            layers, edge = own.num_layers, own.is_last
            layer_s, edge_s, again_s = (part[which].T[:, :, np.newaxis] for part in self.average_s[m])
            average_s = average_s + layers * layer_s + edge * edge_s + usual[m] * again_s
            heavy_s, heavy_edge_s, heavy_again_s = (part[:, :, np.newaxis] for part in self.heaviest_s[m])
            heaviest_s = heaviest_s + layers * heavy_s + edge * heavy_edge_s + again[m] * heavy_again_s
            gather_s, scatter_s = gather_seconds(
                self.problem, spec, own, self.mode.tp, replicas=dp * self.mode.cp, shards=shards
            )
            gathers_s = gathers_s + 2 * gather_s + scatter_s
            plain_s = plain_s + layers * layer_s + edge * edge_s
        compute_s = average_s
        average_s, heaviest_s = with_messages(average_s, gathers_s), with_messages(heaviest_s, gathers_s)
        tau_s, fill_s = average_s.max(axis=2), np.maximum(average_s, heaviest_s).sum(axis=2)
        if params[0].num_layers.shape[1] == 1 and self.with_llm:  # the scheduler packs less with the heaviest sample
            step_s = np.maximum(num * average_s, heaviest_s)[:, :, 0]
            for c in np.flatnonzero(shards > 1):
                of_c = self.mode, num, int(dp[c]), compute_s[:, c, 0], plain_s[:, c, 0], float(gathers_s[c, 0])
                step_s[:, c] = together_s(self.problem, self.specs, *of_c)
            fill_s = step_s - (num - 1) * tau_s
        return tau_s, fill_s


def _select(cut: Cut, rows: Bools) -> Cut:
    """Some grids of a cut."""
    grids, states = cut
    return cut if rows.all() else (grids.select(rows), [of.select(rows) for of in states])


def mean_s(of_scenario: Floats) -> Floats:
    """Mean over the scenarios of `[S, ...]`, added up in their order: sums of any other would round otherwise."""
    total_s: Floats = functools.reduce(operator.add, of_scenario)
    return total_s / len(of_scenario)
