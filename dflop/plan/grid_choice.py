"""Grids of ranks that hold stages of some modules, one behind the other: what drafts of plans are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from dflop.cost.model import Floats
from dflop.plan.candidates import Bools
from dflop.records import ModuleSpec, ParallelSpec, RunMode
from dflop.schedule.items import Ints


@dataclass(frozen=True, slots=True)
class GridChoice:
    """A grid for a subset of the modules."""

    parallel: ParallelSpec
    layers: Mapping[str, tuple[int, ...]]
    """Per module and stage, in the order of the modules."""
    recomputed: Mapping[str, tuple[int, ...]]
    """Layers of these that are recomputed or keep their activations on the host."""
    shard_optimizer: bool = False
    parameter_shards: int = 1

    @classmethod
    def of(
        cls,
        parallel: ParallelSpec,
        layers: Mapping[str, tuple[int, ...]],
        *,
        recompute: bool = False,
        shard_optimizer: bool = False,
        parameter_shards: int = 1,
    ) -> GridChoice:
        """A grid in which all layers run again in the backward pass, or none."""
        again = {name: tuple(n * recompute for n in own) for name, own in layers.items()}
        return cls(parallel, layers, again, shard_optimizer, parameter_shards)

    @property
    def num_recomputed(self) -> int:
        return sum(map(sum, self.recomputed.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Grids:
    """C grids of P stages for the same modules in one mode, with the terms of the formula (`columns.py`)."""

    specs: tuple[ModuleSpec, ...]
    mode: RunMode
    shards_optimizer: bool
    """Whether several replicas share out the optimizer's states even where they do not share out parameters."""
    layers: Ints
    """`[modules, C, P]`."""
    again: Ints
    """As `layers`, those that run again in the backward pass or have their activations on the host."""
    dp: Ints
    shards: Ints
    """`[C]`, replicas that share out parameters."""
    tau_s: Floats
    """`[S, C]`, the slowest stage on an average microbatch."""
    fill_s: Floats
    """`[S, C]`, what a step takes beyond that in all microbatches but one."""
    sync_s: Floats
    """`[C]`, behind the pipeline."""
    alone_s: Floats
    """`[C]`, formula values of plans of one of the grids alone."""
    max_llm_pp: Floats
    """`[C]`, deepest LLM that grids of encoders can stand in front of; infinite for those with the LLM."""

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def pp(self) -> int:
        return int(self.layers.shape[2])

    @property
    def num_processes(self) -> Ints:
        return self.mode.tp * self.mode.cp * self.pp * self.dp

    @property
    def num_recomputed(self) -> Ints:
        found: Ints = self.again.sum(axis=(0, 2))
        return found

    def select(self, rows: Ints | Bools | slice) -> Grids:
        """The grids at indices or under a mask, in that order."""
        changed = {name: getattr(self, name)[:, rows] for name in ("layers", "again")}
        of_last = ("dp", "shards", "tau_s", "fill_s", "sync_s", "alone_s", "max_llm_pp")
        return dataclasses.replace(self, **changed, **{name: getattr(self, name)[..., rows] for name in of_last})

    def put(self, where: Bools, others: Grids) -> Grids:
        """The same with others under a mask, which are alike but for layers that run again."""
        changed = {}
        for name in ("again", "tau_s", "fill_s", "sync_s", "alone_s"):
            changed[name] = getattr(self, name).copy()
            changed[name][(slice(None), where) if name in ("again", "tau_s", "fill_s") else where] = getattr(
                others, name
            )
        return dataclasses.replace(self, **changed)

    def choice(self, index: int) -> GridChoice:
        """One of them."""
        dp, shards, names = int(self.dp[index]), int(self.shards[index]), [spec.module for spec in self.specs]
        layers, again = (
            dict(zip(names, map(tuple, array[:, index].tolist()), strict=True)) for array in (self.layers, self.again)
        )
        shares = dp * self.mode.cp > 1 and (self.shards_optimizer or shards > 1)
        parallel = ParallelSpec(self.mode.tp, self.pp, dp, self.mode.cp, self.mode.ep)
        return GridChoice(parallel, layers, again, shares, shards)
