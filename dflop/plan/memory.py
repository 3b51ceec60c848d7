"""Peak memory per process of every stage: what a plan must fit, as a hard constraint.

State is 16 bytes per parameter: float32 weight, gradient and two Adam moments, or under mixed precision a 16-bit
weight and gradient beside a float32 master weight and the moments. Activations are those of the largest microbatch
the scheduler may build times the microbatches in flight under 1F1B. A tenth of the device stays free for
workspaces, communication buffers and fragmentation.
"""

from __future__ import annotations

from dflop.cost.model import CostModel, has_edge
from dflop.plan.candidates import Candidate
from dflop.records import ModuleLoad, ModuleSpec

STATE_BYTES_PER_PARAM = 16
USABLE_MEMORY_FRAC = 0.9


def state_bytes(spec: ModuleSpec, candidate: Candidate, stage: int) -> int:
    """Weights, gradients and optimizer state of one process of a stage.

    The first and the last stage are each charged the whole edge (embedding and head): which half of it sits where,
    and whether they are tied, differs per family, and an upper bound is safe.
    """
    ends = stage in (0, candidate.parallel.pp - 1)
    params = candidate.layers_per_stage[stage] * spec.num_layer_params + ends * spec.num_edge_params
    return STATE_BYTES_PER_PARAM * -(-params // candidate.parallel.tp)


def microbatch_bytes(spec: ModuleSpec, candidate: Candidate, stage: int, cost: CostModel, largest: ModuleLoad) -> int:
    """Activations that the largest microbatch keeps alive on one process of a stage."""
    layers = candidate.layers_per_stage
    kept = cost.activation_bytes(
        spec.module,
        largest.num_items,
        largest.num_tokens,
        largest.sum_sq_tokens,
        num_layers=layers[stage],
        edge=has_edge(layers, stage),
        tp=candidate.parallel.tp,
    )
    return int(kept)


def stage_memory_bytes(
    spec: ModuleSpec,
    candidate: Candidate,
    cost: CostModel,
    largest: ModuleLoad,
    *,
    num_microbatches: int,
    num_stages_beyond: int,
) -> tuple[int, ...]:
    """Predicted peak per process of each stage.

    Args:
        spec: Parameter counts.
        candidate: Layout of the module.
        cost: Activation bytes.
        largest: Load of the largest microbatch on one data-parallel rank.
        num_microbatches: Bounds what is in flight.
        num_stages_beyond: Stages between the module's last one and the loss: the LLM's pp for an encoder, else 0.
    """
    peaks = []
    for stage in range(candidate.parallel.pp):
        in_flight = min(num_microbatches, candidate.parallel.pp - stage + num_stages_beyond)
        activations = microbatch_bytes(spec, candidate, stage, cost, largest)
        peaks.append(state_bytes(spec, candidate, stage) + in_flight * activations)
    return tuple(peaks)


def max_stages_beyond(
    spec: ModuleSpec,
    candidate: Candidate,
    cost: CostModel,
    largest: ModuleLoad,
    *,
    num_microbatches: int,
    usable_bytes: float,
) -> float:
    """Deepest pipeline behind the module that still fits its memory: infinite if any does, negative if none.

    This is `stage_memory_bytes(...) <= usable_bytes` solved for `num_stages_beyond`, which makes the in-flight depth
    of encoder activations a linear constraint of the planning program.
    """
    limit = float("inf")
    for stage in range(candidate.parallel.pp):
        spare = usable_bytes - state_bytes(spec, candidate, stage)
        activations = microbatch_bytes(spec, candidate, stage, cost, largest)
        if spare < 0:
            return -1.0
        if num_microbatches * activations > spare:
            limit = min(limit, spare // activations - (candidate.parallel.pp - stage))
    return max(limit, -1.0)
