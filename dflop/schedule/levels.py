"""Levels of corrections by size that fit given batches: for seconds of loads whose items are not known one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflop.cost.model import CostModel
from dflop.records import ModuleFactors, SampleShape
from dflop.schedule.items import module_items


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
