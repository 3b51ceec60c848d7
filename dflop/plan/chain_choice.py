"""Chains of stages on grids, from arrays of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflop.cost.model import Floats
from dflop.records import ModuleSpec, ParallelSpec
from dflop.schedule.items import Ints


@dataclass(frozen=True, slots=True)
class ChainChoice:
    """A chain on a grid."""

    formula_s: float
    parallel: ParallelSpec
    layers: dict[str, tuple[int, ...]]
    """Per module and stage."""
    recomputed: dict[str, tuple[int, ...]]
    """Of these, those that run again in the backward pass or have their activations on the host."""
    parameter_shards: int

    @property
    def num_recomputed(self) -> int:
        return sum(map(sum, self.recomputed.values()))


def chain_choices(
    specs: Sequence[ModuleSpec],
    tp: int,
    cp: int,
    layers: Ints,
    again: Ints,
    dp: Ints,
    shards: Ints,
    step_s: Floats,
) -> list[ChainChoice]:
    """C chains of one tp and cp.

    Args:
        specs: Modules in their order.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        layers: `[modules, C, P]`.
        again: As `layers`, those that run again.
        dp: `[C]`.
        shards: `[C]`, replicas that share out parameters.
        step_s: `[C]`, values of the formula.
    """
    names, columns = [spec.module for spec in specs], (step_s, dp, shards, layers.swapaxes(0, 1), again.swapaxes(0, 1))

    def by_name(of_choice: list[list[int]]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(stages) for name, stages in zip(names, of_choice, strict=True)}

    return [
        ChainChoice(formula_s, ParallelSpec(tp, layers.shape[2], groups, cp), by_name(own), by_name(its), shared)
        for formula_s, groups, shared, own, its in zip(*(column.tolist() for column in columns), strict=True)
    ]
