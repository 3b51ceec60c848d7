"""Peak memory per process of every stage: what a plan must fit, as a hard constraint.

A trained parameter takes 18 bytes in 16-bit types: the weight beside a gradient, a master weight and two Adam moments
in float32, as `train/optim.py` and Megatron-LM keep them; in float32 16, without a master. What only the optimizer
needs is divided among the data-parallel replicas where they share it out (ZeRO-1, arXiv 1910.02054). A frozen parameter
is a weight and nothing else, that of a frozen tower, too, whose projector trains.
Activations are those of the largest microbatch the scheduler may build times the microbatches in flight under 1F1B.
With recomputation that is a layer's input, and the layer that runs again in the backward pass has all of its
activations for a while: one layer's, once (arXiv 1604.06174).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.cost.identity import bytes_per_value
from dflop.cost.model import CostModel, Floats
from dflop.cost.towers import trains_layers
from dflop.plan.candidates import Bools, Candidates
from dflop.records import LLM, CostTable, ModuleSpec
from dflop.schedule.items import Ints

GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES = 4, 4, 8
"""Per trained parameter; the master is left out where the weight itself is float32."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes per process of the P stages of C layouts, each `[C, P]` and in whole bytes, so that sums are exact."""

    state: Floats
    """Weights, gradients, optimizer."""
    kept: Floats
    """Activations of one microbatch in flight."""
    once: Floats
    """What a recomputed layer needs on top while it runs."""

    def peaks(self, in_flight: npt.ArrayLike) -> Floats:
        """`[C, P]` with `in_flight` microbatches (`[C, P]`)."""
        peak: Floats = self.state + np.asarray(in_flight) * self.kept + self.once
        return peak

    def __add__(self, other: StageBytes) -> StageBytes:
        """Two modules on the same stages; their layers run one after the other."""
        return StageBytes(self.state + other.state, self.kept + other.kept, np.maximum(self.once, other.once))


def param_bytes(table: CostTable, *, trains: bool = True) -> tuple[int, int]:
    """Bytes per parameter of a module: what every replica needs, and what only the optimizer does.

    Args:
        table: Of the module.
        trains: Whether this parameter does, in a module that is not frozen.
    """
    weight = bytes_per_value(table.dtype)
    if table.is_frozen or not trains:
        return weight, 0
    return weight + GRADIENT_BYTES, MOMENT_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)


def ends_and_edge(layers: Ints) -> tuple[Bools, Bools]:
    """For layers `[..., P]`: stages that hold the first or last layer of the module, and those that run its edge."""
    holds = layers > 0
    beyond = np.zeros((*layers.shape[:-1], 1), dtype=bool)
    before, after = np.concatenate([beyond, holds[..., :-1]], -1), np.concatenate([holds[..., 1:], beyond], -1)
    return holds & ~(before & after), holds & ~after


def stage_params(spec: ModuleSpec, layers: Ints, tp: npt.ArrayLike) -> Ints:
    """`[..., P]`: parameters of one process of each stage.

    The first and the last stage are each charged the whole edge (embedding and head): which half of it sits where,
    and whether they are tied, differs per family, and an upper bound is safe. Tensor parallelism cuts the layers, and
    the edge of an LLM.
    """
    return layer_params(spec, layers, tp) + edge_params(spec, layers, tp)


def layer_params(spec: ModuleSpec, layers: Ints, tp: npt.ArrayLike) -> Ints:
    """`[..., P]`: those of `stage_params` that are in layers."""
    found: Ints = -(-layers * spec.num_layer_params // np.asarray(tp, dtype=np.int64))
    return found


def edge_params(spec: ModuleSpec, layers: Ints, tp: npt.ArrayLike) -> Ints:
    """`[..., P]`: those of `stage_params` that are outside of them."""
    ends, _ = ends_and_edge(layers)
    degree = np.asarray(tp, dtype=np.int64) if spec.module == LLM else 1
    found: Ints = ends * -(-spec.num_edge_params // degree)
    return found


def stage_bytes(
    spec: ModuleSpec,
    cost: CostModel,
    layers: Ints,
    load: Floats,
    *,
    tp: int,
    dp: npt.ArrayLike,
    recompute: bool,
    shard_optimizer: npt.ArrayLike,
) -> StageBytes:
    """What C layouts of one module at one tp and one way of running keep.

    Args:
        spec: Parameter counts.
        cost: Activation bytes.
        layers: `[C, P]`, zeros where a stage holds none of the module's layers.
        load: `[3, C]`, items, tokens and squared tokens of the largest microbatch on one data-parallel rank.
        tp: Tensor-parallel degree.
        dp: `[C]`, replicas.
        recompute: Whether layers keep their inputs only.
        shard_optimizer: `[C]`, whether the replicas share out the optimizer's states. Like `load` and `dp`, C may be 1.
    """
    table = cost.table(spec.module, tp, recompute)
    _, edge = ends_and_edge(layers)

    def state(num_params: Ints, trains: bool) -> Floats:
        always, optimizer = param_bytes(table, trains=trains)
        per_param = always + optimizer / np.where(shard_optimizer, dp, 1)
        found: Floats = num_params * per_param[:, np.newaxis]
        return found

    def activations(num_layers: int, is_edge: bool, way: bool) -> Floats:
        found = cost.activation_bytes(spec.module, *load, num_layers=num_layers, edge=is_edge, tp=tp, recompute=way)
        return found[:, np.newaxis]

    return StageBytes(
        state=np.ceil(
            state(layer_params(spec, layers, tp), trains_layers(table)) + state(edge_params(spec, layers, tp), True)
        ),
        kept=np.ceil(layers * activations(1, False, recompute) + edge * activations(0, True, recompute)),
        once=np.ceil((layers > 0) * activations(1, False, False)) if recompute else np.zeros(layers.shape),
    )


def candidate_bytes(candidates: Candidates, cost: CostModel, load: Floats) -> StageBytes:
    """`stage_bytes` of candidates of any tp and way; `load` is `[3, C]`."""
    layers = candidates.layers
    found = StageBytes(*(np.zeros(layers.shape) for _ in range(3)))
    for tp, recompute, rows in candidates.groups():
        part = stage_bytes(
            candidates.spec,
            cost,
            layers[rows],
            load[:, rows],
            tp=tp,
            dp=candidates.dp[rows],
            recompute=recompute,
            shard_optimizer=candidates.shard_optimizer[rows],
        )
        found.state[rows], found.kept[rows], found.once[rows] = part.state, part.kept, part.once
    return found


def in_flight(pp: npt.ArrayLike, num_microbatches: int, num_stages_beyond: npt.ArrayLike, num_stages: int) -> Ints:
    """`[C, num_stages]` microbatches a stage holds under 1F1B; `pp` and `num_stages_beyond` are `[C]`.

    `num_stages_beyond` counts the stages between the module's last one and the loss: the LLM's pp for an encoder with
    ranks of its own, else 0.
    """
    total = np.asarray(pp) + np.asarray(num_stages_beyond)
    found: Ints = np.clip(total[..., np.newaxis] - np.arange(num_stages), 0, num_microbatches)
    return found


def max_stages_beyond(found: StageBytes, pp: Ints, *, num_microbatches: int, usable_bytes: float) -> Floats:
    """`[C]`: deepest pipeline behind a module that still fits its memory: infinite if any does, negative if none.

    This is `peaks(in_flight) <= usable_bytes` solved for `num_stages_beyond`, which makes the in-flight depth of
    encoder activations a linear constraint of the planning program.
    """
    stage = np.arange(found.state.shape[1])
    spare = usable_bytes - found.state - found.once
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.floor(spare / found.kept)
    depth = np.where(num_microbatches * found.kept <= spare, np.inf, most - (pp[:, np.newaxis] - stage))
    depth = np.where(spare < 0, -1.0, depth)
    depth = np.where(stage < pp[:, np.newaxis], depth, np.inf)
    deepest: Floats = np.maximum(depth.min(axis=1), -1.0)
    return deepest
