"""What chains of stages keep, whatever their cuts: which layers of them run again, and whether they fit.

What microbatches keep is worked out once per number of groups, what stages hold whatever they run once per cuts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import NUM_SHARD_CHOICES, Bools, shard_choices
from dflop.plan.memory import NUM_WAITING, LoadBytes, StageBytes, StageState
from dflop.plan.offload import offloaded_layers
from dflop.plan.space import Problem
from dflop.plan.stage_params import StageParams, chain_params
from dflop.records import LLM, ModuleSpec, RunMode
from dflop.schedule.items import Ints
from dflop.simulate.order import in_flight


@dataclass(frozen=True)
class ChainMemory:
    """Memory of chains of one mode and one number of microbatches."""

    problem: Problem
    specs: tuple[ModuleSpec, ...]
    mode: RunMode
    ways: tuple[bool, ...]
    """Whether layers may keep their activations, and whether they may run again."""
    num_microbatches: int
    dps: tuple[int, ...]
    """Numbers of groups, ascending."""
    num_layers: Ints
    """`[modules]`."""
    again_s: Floats
    """`[modules, powers]`, see `Chain`."""

    @functools.cached_property
    def whole_bytes(self) -> Floats:
        """`[NUM_SHARD_CHOICES, D]`: the least that all stages keep together, by number of groups as in `dps`."""
        problem, mode = self.problem, self.mode
        most = min(problem.global_batch_size, problem.cluster.num_processes // (mode.tp * mode.cp))
        every = np.array(problem.dps(most), dtype=np.int64)

        def layers(num: int) -> Ints:
            return np.repeat(self.num_layers[:, np.newaxis, np.newaxis], num, axis=1)

        def states() -> list[StageState]:
            shards = np.maximum(np.concatenate(shard_choices(problem, mode, every)), 1)
            params = chain_params(self.specs, layers(len(shards)), mode)
            return self.states(params, np.tile(every, NUM_SHARD_CHOICES), shards)

        known = problem.once(("whole states", *(spec.module for spec in self.specs), mode), states)
        own = np.flatnonzero(np.tile(np.isin(every, self.dps), NUM_SHARD_CHOICES))
        again, dp = layers(len(own)), np.tile(self.dps, NUM_SHARD_CHOICES)
        held = self.held([of.select(own) for of in known], again, again * (True in self.ways), dp)
        found: Floats = (held.state + held.kept)[:, 0].reshape(NUM_SHARD_CHOICES, -1)
        return found

    def which(self, dp: Ints) -> Ints:
        """`[C]`: places of numbers of groups in `dps`."""
        return np.searchsorted(list(self.dps), dp)

    @functools.cached_property
    def _largest(self) -> tuple[tuple[LoadBytes, LoadBytes], ...]:
        """Per module, by groups as in `dps`, the largest microbatch where none runs again, and where some do."""
        buckets = self.num_microbatches * np.array(list(self.dps))
        loads = self.problem.sample_loads if self.with_llm else self.problem.loads
        return tuple(self._load_bytes(spec, loads[spec.module].largest(buckets)) for spec in self.specs)

    @functools.cached_property
    def _average(self) -> tuple[LoadBytes, LoadBytes]:
        """As `_largest`, of the LLM in an average microbatch."""
        buckets = self.num_microbatches * np.array(list(self.dps))
        return self._load_bytes(self.specs[-1], self.problem.sample_loads[LLM].typical(buckets))

    def _loads(self, usual: bool) -> tuple[tuple[LoadBytes, LoadBytes], ...]:
        return (*self._largest[:-1], self._average) if usual else self._largest

    def _load_bytes(self, spec: ModuleSpec, load: Floats) -> tuple[LoadBytes, LoadBytes]:
        load = self.problem.uneven(spec.module, load, self.mode.cp)
        of = functools.partial(LoadBytes.of, spec, self.problem.cost, load)
        plain = of(self.mode)
        return plain, of(self.mode.recomputing(True)) if True in self.ways else plain

    def depth(self, pp: int) -> Ints:
        """`[P]` microbatches in flight."""
        return in_flight(self.num_microbatches, np.arange(pp)[::-1])

    def recomputed(self, layers: Ints, states: Sequence[StageState], dp: Ints) -> tuple[Ints, Bools]:
        """(`[modules, C, P]` fewest layers that run again, `[C]` whether all stages of a chain fit so)."""
        depth, none = self.depth(layers.shape[2]), np.zeros_like(layers)
        again = none if False in self.ways else layers
        held = self.held(states, layers, again, dp)
        is_over = self.is_over(held)
        if self.ways == (False, True) and is_over.any():
            again = self.least(held, layers, depth, dp)[0]
            is_over = self.is_over(self.held(states, layers, again, dp))
            if is_over.any():  # what a stage received is kept, too
                again = np.where(is_over, layers, again)
                is_over = self.is_over(self.held(states, layers, again, dp))
        return again, np.asarray(~is_over.any(axis=1))

    @property
    def per_microbatch(self) -> bool:
        """Whether the LLM's layers run again where a microbatch's tokens ask for it."""
        space = self.problem.space
        return self.with_llm and self.ways == (False, True) and not space.host_bytes and space.rules is None

    @property
    def with_llm(self) -> bool:
        return self.specs[-1].module == LLM

    def usual(self, states: Sequence[StageState], layers: Ints, again: Ints, dp: Ints) -> Ints:
        """`again`, but the LLM's as an average microbatch asks for."""
        if not (self.per_microbatch and again[-1].any()):
            return again
        depth, none = self.depth(layers.shape[2]), np.zeros_like(again[-1:])
        held = self.held(states, layers, np.concatenate([again[:-1], none]), dp, usual=True)
        over = held.state + depth * held.kept + held.once - self.problem.usable_bytes
        saved = depth * self._saved_bytes(dp, usual=True)[0][-1][:, np.newaxis]
        wanted = np.ceil(np.maximum(over, 0.0) / np.maximum(saved, 1.0)).astype(np.int64)
        return np.concatenate([again[:-1], np.minimum(again[-1:], np.where(saved > 0, wanted, 0)[np.newaxis])])

    def is_over(self, held: StageBytes) -> Bools:
        """`[C, P]`: whether stages go beyond the memory."""
        peaks = held.peaks(self.depth(held.kept.shape[1]))
        return np.asarray(peaks > self.problem.usable_bytes)

    def least(self, held: StageBytes, layers: Ints, depth: Ints, dp: Ints) -> tuple[Ints, Bools]:
        """Layers `[modules, C, P]` that bring stages into memory, cheapest bytes first, and `[C, P]` whether they do.

        `held` is without any; `depth` `[P]` are microbatches in flight.
        """
        usable_bytes, again = self.problem.usable_bytes, np.zeros_like(layers)
        saves, keeps = self._saved_bytes(dp, usual=False)
        over = held.state + depth * held.kept + held.once - usable_bytes
        if self.problem.space.host_bytes:
            over = over + (over > 0) * NUM_WAITING * keeps[-1][:, np.newaxis]
        if True in self.ways:
            price = self.again_s.mean(axis=1) / np.maximum(saves.mean(axis=1), 1.0)
            for m in np.argsort(price, kind="stable"):
                saved = depth * saves[m][:, np.newaxis]
                wanted = np.ceil(np.maximum(over, 0.0) / np.maximum(saved, 1.0))
                again[m] = np.where(saved > 0, np.minimum(layers[m], wanted), 0)
                over = over - again[m] * saved
            # Where all of a module's layers run again, one of them at a time keeps all of its activations.
            over = over + (keeps[:, :, np.newaxis] * ((again > 0) & (again == layers))).max(axis=0)
        return again, np.asarray(over <= 0)

    def _saved_bytes(self, dp: Ints, usual: bool) -> tuple[Floats, Floats]:
        """`[modules, C]` each: what a layer that runs again keeps less of a microbatch, and what others keep."""
        which, pairs = self.which(dp), self._loads(usual)
        plain = np.array([of.plain[which, 0] for of, _ in pairs])
        again = np.array([(of.again if True in self.ways else of.plain)[which, 0] for _, of in pairs])
        return plain - again, plain

    def offloaded(self, layers: Ints, again: Ints, depth: Ints, dp: Ints) -> Ints:
        """`[modules, C, P]`: those of layers `again` whose activations go to the host; `depth` `[P]` are in flight."""
        found, of_llm = np.zeros_like(layers), (layers[-1], again[-1])
        if not self.with_llm:
            return found
        found[-1] = offloaded_layers(self.problem, *of_llm, self.num_microbatches, depth, self.mode, dp=dp)
        return found

    def states(self, params: Iterable[StageParams], dp: Ints, shards: Ints) -> list[StageState]:
        """Per module what stages of C chains hold whatever they run; `params` are `[C, P]` per module."""
        shares, replicas, of = self.shares_optimizer(dp), dp * self.mode.cp, self.problem.cost.table
        return [
            StageState.of(own, of(spec.module, self.mode), replicas=replicas, shard_optimizer=shares, shards=shards)
            for spec, own in zip(self.specs, params, strict=True)
        ]

    def held(
        self, states: Sequence[StageState], layers: Ints, again: Ints, dp: Ints, *, usual: bool = False
    ) -> StageBytes:
        """Bytes of C chains: `layers` and `again` are `[modules, C, P]`; `usual`: the LLM has an average microbatch."""
        which, pairs = self.which(dp), self._loads(usual)
        away = self.offloaded(layers, again, self.depth(layers.shape[2]), dp) if self.problem.space.host_bytes else None
        left = again if away is None else again - away
        parts = (
            state.holding(pairs[m][int(left[m].any())].select(which), left[m], 0 if away is None else away[m])
            for m, state in enumerate(states)
        )
        return functools.reduce(operator.add, parts)

    def shares_optimizer(self, dp: Ints) -> Bools:
        return self.problem.space.shard_optimizer & (dp * self.mode.cp > 1)
