"""Grids of ranks that hold stages of some modules, one behind the other: what drafts of plans are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflop.cost.model import Floats
from dflop.records import ModuleSpec, ParallelSpec
from dflop.schedule.items import Ints


@dataclass(frozen=True, slots=True)
class GridChoice:
    """A grid for a subset of the modules."""

    parallel: ParallelSpec
    layers: Mapping[str, tuple[int, ...]]
    """Per module and stage, in the order of the modules."""
    recomputed: Mapping[str, tuple[int, ...]]
    """Of these, those that run again in the backward pass or have their activations on the host."""
    shard_optimizer: bool = False
    parameter_shards: int = 1
    formula_s: float = 0.0
    """Of a plan of this grid alone."""

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


def grid_choices(
    specs: Sequence[ModuleSpec],
    tp: int,
    cp: int,
    layers: Ints,
    again: Ints,
    dp: Ints,
    shards: Ints,
    step_s: Floats,
    *,
    shard_optimizer: bool,
) -> list[GridChoice]:
    """C grids of one tp and cp.

    Args:
        specs: Modules in their order.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        layers: `[modules, C, P]`.
        again: As `layers`, those that run again.
        dp: `[C]`.
        shards: `[C]`, replicas that share out parameters.
        step_s: `[C]`, values of the formula.
        shard_optimizer: Whether several replicas share out the optimizer's states without sharing out parameters, too.
    """
    names, columns = [spec.module for spec in specs], (step_s, dp, shards, layers.swapaxes(0, 1), again.swapaxes(0, 1))

    def by_name(of_choice: list[list[int]]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(stages) for name, stages in zip(names, of_choice, strict=True)}

    return [
        GridChoice(
            ParallelSpec(tp, layers.shape[2], groups, cp),
            by_name(own),
            by_name(its),
            shard_optimizer=groups * cp > 1 and (shard_optimizer or shared > 1),
            parameter_shards=shared,
            formula_s=formula_s,
        )
        for formula_s, groups, shared, own, its in zip(*(column.tolist() for column in columns), strict=True)
    ]
