"""A global batch as arrays: the items of each module, and the loads and seconds of any way of owning them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dflop.cost.model import CostModel, Floats, StageKind, stage_kind
from dflop.records import LLM, ModuleFactors, ModulePlan, ModuleWork, SampleShape
from dflop.simulate.pieces import num_parts
from dflop.simulate.step import Node

Ints = npt.NDArray[np.int64]
Owner = tuple[tuple[tuple[int, ...], ...], ...]
"""`owner[microbatch][dp_rank]` = item ids in packed order."""


@dataclass(frozen=True, slots=True)
class ModuleItems:
    """Items of one module in a global batch, in arrival order; for the LLM an item is a whole sample."""

    module: str
    sample: tuple[int, ...]
    """Position in the batch of the sample each item belongs to."""
    rank_in_sample: tuple[int, ...]
    rows: tuple[int, ...]
    num_items: Ints
    """As `ModuleLoad.num_items`: 1 for an encoder's item, tokens that carry loss for a sample."""
    num_tokens: Ints
    sum_sq_tokens: Ints

    sample_of: Ints
    """`sample` as an array."""
    num_parts: Ints
    """Tiles or frames of each that can be encoded apart from the others; 1 for a sample."""

    @property
    def loads(self) -> tuple[Ints, Ints, Ints]:
        return self.num_items, self.num_tokens, self.sum_sq_tokens

    def work(self, owner: Owner) -> ModuleWork:
        """The items under an owner, as it travels in a `StepPlan`."""
        return ModuleWork(self.module, self.sample, self.rank_in_sample, self.rows, owner)


def module_items(batch: Sequence[SampleShape], module: str) -> ModuleItems:
    """Items that `batch` brings to `module`."""
    columns = (
        [
            (position, 0, load.num_tokens, load.num_items, load.num_tokens, load.sum_sq_tokens, 1)
            for position, load in enumerate(sample.load(LLM) for sample in batch)
        ]
        if module == LLM
        else [
            (position, rank, item.num_rows, 1, item.num_tokens, item.sum_sq_tokens, num_parts(item))
            for position, sample in enumerate(batch)
            for rank, item in enumerate(sample.items)
            if item.module == module
        ]
    )
    table = np.ascontiguousarray(np.array(columns, dtype=np.int64).reshape(-1, 7).T)
    sample, rank_in_sample, rows = (tuple(column.tolist()) for column in table[:3])
    return ModuleItems(module, sample, rank_in_sample, rows, table[3], table[4], table[5], table[0].copy(), table[6])


def owner_cells(owner: Owner, num_items: int) -> Ints:
    """`microbatch * dp + rank` of every item under an owner of all of them."""
    cells = [ids for ranks in owner for ids in ranks]
    cell = np.zeros(num_items, dtype=np.int64)
    owned = np.fromiter(itertools.chain.from_iterable(cells), dtype=np.int64)
    cell[owned] = np.repeat(np.arange(len(cells)), [len(ids) for ids in cells])
    return cell


@dataclass(frozen=True, slots=True)
class StageMix:
    """Items on stages of one kind, for corrections by size: a microbatch's factor is the mean of its items'."""

    weight_s: Floats
    """`[items]` what each item counts."""
    corrected_s: Floats
    """`[items]` that times the item's factor."""
    level: float
    """Factor of microbatches in which nothing counts."""

    def factors(self, cell: Ints, num_cells: int) -> Floats:
        """`[cells]` from the cell of every item."""
        total_s = np.bincount(cell, self.weight_s, num_cells)
        corrected_s = np.bincount(cell, self.corrected_s, num_cells)
        found: Floats = np.divide(corrected_s, total_s, out=np.full(num_cells, self.level), where=total_s > 0)
        return found


def stage_mix(part: ModulePlan, kind: StageKind, items: ModuleItems, cost: CostModel) -> StageMix | None:
    """The items of a module on its stages of a kind; None where all sizes have one factor, the level."""
    if not cost.is_by_size(part.module):
        return None
    weight_s = item_weights(part, kind, items, cost)
    return StageMix(weight_s, weight_s * cost.item_factors(part.module, items.num_tokens), cost.level(part.module))


def item_weights(part: ModulePlan, kind: StageKind, items: ModuleItems, cost: CostModel) -> Floats:
    """`[items]` by which a stage's seconds are shared out: what each adds, uncorrected; tokens where none adds any."""
    added_s = cost.item_seconds(part.module, items.loads, **kind.costs(), factor=1.0)
    return added_s if added_s.any() else items.num_tokens.astype(np.float64)


def stage_slowness(pipe: ModulePlan, slowness: Mapping[Node, float] | None) -> Floats:
    """`[pp, dp]` what multiplies the seconds of a pipe's nodes; 1.0 where nothing is said."""
    parallel, given = pipe.parallel, slowness or {}
    return np.array(
        [[given.get((pipe.module, s, r), 1.0) for r in range(parallel.dp)] for s in range(parallel.pp)], dtype=float
    )


def item_seconds(module_plan: ModulePlan, items: ModuleItems, cost: CostModel) -> Floats:
    """Seconds each item adds to the slowest stage of its module: the weight that balancing works with."""
    per_stage = [
        cost.item_seconds(items.module, items.loads, **stage_kind(module_plan, stage).costs())
        for stage in range(module_plan.parallel.pp)
    ]
    return max(per_stage, key=lambda seconds: float(seconds.sum()))


def levelled(cost: CostModel, batches: Sequence[Sequence[SampleShape]]) -> CostModel:
    """The same corrections, the level of each module being the mean factor of its items in these batches.

    A planner asks for the seconds of average and of largest microbatches, which `module_seconds` answers at the level.
    What a run learnt on other batches, longer ones say, has another level: this one makes such answers agree with what
    the scheduler will predict item by item for these batches. Items weigh the seconds that they add to the whole
    module, uncorrected. Corrections for all sizes alike stay as they are, and so do those of modules without items.

    Args:
        cost: With corrections.
        batches: What will be trained on.
    """
    samples = [sample for batch in batches for sample in batch]
    found = dict(cost.corrections)
    for module, factors in found.items():
        if isinstance(factors, ModuleFactors) and cost.is_by_size(module):
            level = _level(cost.extrapolating(), module, samples)
            found[module] = replace(factors, level=factors.level if level is None else level)
    return cost.with_corrections(found)


def _level(cost: CostModel, module: str, samples: Sequence[SampleShape]) -> float | None:
    """None where nothing that the samples bring to the module takes time."""
    items, table = module_items(samples, module), next(t for t in cost.tables if t.module == module)
    seconds = cost.item_seconds(
        module,
        items.loads,
        table.mode,
        num_layers=table.num_layers,
        edge=True,
        factor=1.0,
    )
    total_s = float(seconds.sum())
    return float((seconds * cost.item_factors(module, items.num_tokens)).sum()) / total_s if total_s > 0 else None
