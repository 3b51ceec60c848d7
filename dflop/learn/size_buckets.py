"""What sizes of items a run's seconds are of: buckets over its samples, and the work that a global batch brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflop.correct.buckets import bucket_edges, bucket_of
from dflop.correct.drift_detector import Usual, usual_of
from dflop.cost.model import CostModel, Floats, StageKind
from dflop.records import ModulePlan, Plan, RunMode, SampleShape
from dflop.schedule.items import ModuleItems, item_weights, module_items

MAX_SAMPLES = 20_000
"""Samples of a run that buckets are made from: more do not move them."""


def run_edges(plan: Plan, cost: CostModel, shapes: Sequence[SampleShape]) -> dict[str, tuple[int, ...]]:
    """Per module of a plan, where buckets begin that hold about equal shares of its predicted, uncorrected seconds.

    Of very many samples, evenly spread ones are taken.
    """
    some = shapes[:: 1 + len(shapes) // MAX_SAMPLES]
    weights = np.array([s.weight for s in some])
    edges = {}
    for part in plan.modules:
        items = module_items(some, part.module)
        edges[part.module] = bucket_edges(items.num_tokens, _seconds(part, items, cost), weights[items.sample_of])
    return edges


def batch_work(
    plan: Plan, cost: CostModel, batch: Sequence[SampleShape], edges: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, float], dict[str, Floats]]:
    """(uncorrected seconds of a global batch per module, shares of its buckets in them), however it is packed.

    Modules without work have 0 seconds and no shares.
    """
    seconds: dict[str, float] = {}
    shares: dict[str, Floats] = {}
    for part in plan.modules:
        items = module_items(batch, part.module)
        bucket = bucket_of(items.num_tokens, edges[part.module])
        found = np.bincount(bucket, _seconds(part, items, cost), len(edges[part.module]) + 1)
        seconds[part.module] = total = float(found.sum())
        if total > 0:
            shares[part.module] = found / total
    return seconds, shares


def usual_work(work: Sequence[tuple[Mapping[str, float], Mapping[str, Floats]]]) -> dict[str, Usual]:
    """What batches bring to each module that some of them bring work to, from the `batch_work` of each."""
    found = {}
    for module in work[0][0]:
        seconds = np.array([of_batch[module] for of_batch, _ in work])
        if seconds.any():
            found[module] = usual_of(seconds, np.stack([shares[module] for _, shares in work if module in shares]))
    return found


def _seconds(part: ModulePlan, items: ModuleItems, cost: CostModel) -> Floats:
    """`[items]`, uncorrected, of all layers of a module."""
    kind = StageKind(sum(part.layers_per_stage), True, RunMode(recompute=part.recomputed_frac()))
    return item_weights(part, kind, items, cost.uncorrected().extrapolating())
