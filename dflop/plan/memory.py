"""Peak memory per process of every stage: what a plan must fit, as a hard constraint, and what the engine really holds.

A trained parameter takes 18 bytes in 16-bit types: the weight beside a gradient, a master weight and two Adam moments
in float32, as `train/optim.py` and Megatron-LM keep them; in float32 16, without a master. Where replicas share out the
optimizer (ZeRO-1, arXiv 1910.02054) each owns whole parameters, so the fullest has the mean or one large matrix. Where
they share out parameters (FSDP2), a replica has its part of weights, gradients and optimizer in float32, and whole
what it has gathered and the gradients of one layer, and from the first pass of a step to the last weights and
gradients of its experts where it shares experts. A frozen parameter is a weight in the type of the model and nothing
else, the base of adapters as well; but for a frozen encoder's, it is shared out like the others.
Which parameters a stage holds is in `stage_params.py`.

Activations are those of the largest microbatch the scheduler may build times the microbatches in flight under 1F1B,
with what a stage received and sent. Context-parallel ranks share them, and each keeps the keys and values that it was
sent of the longest sample. On top come, one at a time, what the loss takes (`models/loss_size.py`), the
gradient of the largest matrix before it is added up in float32, and what a layer at work needs, with recomputation all
of its activations (arXiv 1604.06174). `tests/train/test_engine_bytes.py` holds all of this to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.cost.expert_parallel import uneven_bytes_per_token
from dflop.cost.identity import bytes_per_value
from dflop.cost.model import CostModel, Floats
from dflop.models.loss_size import loss_peak_bytes
from dflop.plan.candidates import Bools
from dflop.plan.stage_params import FLOAT32_BYTES, StageParams, stage_params
from dflop.records import FP8_OFF, LLM, ONE_RANK, CostTable, ModuleSpec, RunMode
from dflop.schedule.items import Ints

CAST_BYTES = 9
"""Bytes of a value while it is cast to 8 bit: scaled and clamped in float32, and the 8 bit; less if compiled."""
NUM_WAITING = 2
"""Layers whose activations wait on the device for their copy to the host."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes per process of the P stages of C layouts, each `[C, P]` and in whole bytes, so that sums are exact."""

    weights: Floats
    gradients: Floats
    mean_optimizer: Floats
    """Were it shared out evenly where it is shared out."""
    least_optimizer: Floats
    """Parameters that one replica owns in any case, because none is cut for the optimizer."""
    kept: Floats
    """Activations of one microbatch in flight."""
    once: Floats
    """What is needed on top, for a while: of the loss, a matrix's gradient and a layer at work the largest."""

    @property
    def optimizer(self) -> Floats:
        found: Floats = np.maximum(self.mean_optimizer, self.least_optimizer)
        return found

    @property
    def state(self) -> Floats:
        """Weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    def peaks(self, in_flight: npt.ArrayLike) -> Floats:
        """`[C, P]` with `in_flight` microbatches (`[C, P]`)."""
        peak: Floats = self.state + np.asarray(in_flight) * self.kept + self.once
        return peak

    def __add__(self, other: StageBytes) -> StageBytes:
        """This module and one behind it on the same stages.

        Their layers run one after the other: when this one's backward pass begins, the other has let go of what it kept
        of that microbatch.
        """
        return StageBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.mean_optimizer + other.mean_optimizer,
            np.maximum(self.least_optimizer, other.least_optimizer),
            self.kept + other.kept,
            np.maximum(self.once - other.kept, other.once),
        )


def stage_bytes(
    spec: ModuleSpec,
    cost: CostModel,
    layers: Ints,
    load: Floats,
    mode: RunMode = ONE_RANK,
    *,
    dp: npt.ArrayLike,
    recompute: bool | Ints,
    offloaded: Ints | int = 0,
    shard_optimizer: npt.ArrayLike,
    shards: npt.ArrayLike = 1,
) -> StageBytes:
    """What C layouts of one module on ranks of one mode keep.

    Args:
        spec: Parameter counts.
        cost: Activation bytes.
        layers: `[C, P]`, zeros where a stage holds none of the module's layers.
        load: `[3, C]`, items, tokens and squared tokens of the largest microbatch of one group; a rank has a cp-th.
        mode: Tensor-parallel, context-parallel and expert-parallel degree.
        dp: `[C]`, groups that take samples of their own.
        recompute: Whether layers keep their inputs only, or `[C, P]`, how many of a stage's first ones do.
        offloaded: `[C, P]`, how many of a stage's layers keep nothing, because it goes to the host.
        shard_optimizer: `[C]`, whether replicas share out the optimizer's states. C may be 1 of any of these.
        shards: `[C]` or one for all, replicas that share out parameters, too; 1: none.
    """
    again = layers * recompute if isinstance(recompute, bool) else recompute
    load_bytes = LoadBytes.of(spec, cost, load, mode.recomputing(bool(again.any())))
    params = stage_params(spec, layers, mode.tp, mode.ep)
    state = StageState.of(
        params, load_bytes.table, replicas=np.asarray(dp) * mode.cp, shard_optimizer=shard_optimizer, shards=shards
    )
    return state.holding(load_bytes, again, offloaded)


@dataclass(frozen=True, slots=True)
class LoadBytes:
    """Bytes of the largest microbatch of C groups, whatever stages run it; arrays are `[C, 1]`."""

    spec: ModuleSpec
    table: CostTable
    tp: int
    tokens: Floats
    """Tokens of a rank."""
    num_lost: Floats
    """Tokens of a rank that may carry loss."""
    edge: Floats
    plain: Floats
    """A layer keeps."""
    again: Floats
    """A layer that runs again keeps."""

    @classmethod
    def of(cls, spec: ModuleSpec, cost: CostModel, load: Floats, mode: RunMode) -> LoadBytes:
        """Bytes of loads `[3, C]` of groups; the mode recomputes where any layer may be recomputed."""
        edge = cost.activation_bytes(spec.module, load, mode, num_layers=0, edge=True)
        plain = layer_bytes(spec, cost, load, mode.recomputing(False))
        again = layer_bytes(spec, cost, load, mode) if mode.recompute else np.zeros_like(plain)
        tokens = load[1] / mode.cp
        num_lost = np.minimum(load[0], tokens) if mode.cp > 1 else load[0]  # one rank may have all that carries loss
        columns = (np.reshape(x, (-1, 1)) for x in (tokens, num_lost, edge, plain, again))
        return cls(spec, cost.table(spec.module, mode), mode.tp, *columns)

    def select(self, which: Ints) -> LoadBytes:
        """The bytes of groups at indices."""
        columns = (x[which] for x in (self.tokens, self.num_lost, self.edge, self.plain, self.again))
        return LoadBytes(self.spec, self.table, self.tp, *columns)


@dataclass(frozen=True, slots=True)
class StageState:
    """What the P stages of C layouts of one module hold whatever they run, each `[C, P]`."""

    params: StageParams
    held: tuple[Floats, Floats, Floats, Floats]
    """The first four fields of `StageBytes`."""
    passing: Floats
    """For a while, of shared parameters."""

    @classmethod
    def of(
        cls,
        params: StageParams,
        table: CostTable,
        *,
        replicas: Ints,
        shard_optimizer: npt.ArrayLike,
        shards: npt.ArrayLike,
    ) -> StageState:
        """State of parameters `[C, P]`; the other arguments are `[C]` or one for all."""
        columns = tuple(np.reshape(x, (-1, 1)) for x in (replicas, shard_optimizer, shards))
        passing: Floats = np.zeros(params.num_layers.shape)
        if (columns[2] > 1).any():
            passing = (columns[2] > 1) * passing_bytes(params, table)
        return cls(params, _state(params, table, *columns), passing)

    def select(self, rows: Ints | Bools) -> StageState:
        """The state of layouts at indices or under a mask."""
        weights, gradients, mean, least = (of[rows] for of in self.held)
        return StageState(self.params.select(rows), (weights, gradients, mean, least), self.passing[rows])

    def holding(self, load: LoadBytes, again: Ints, offloaded: Ints | int = 0) -> StageBytes:
        """With the largest microbatch in flight; `again` and `offloaded` are as for `stage_bytes`."""
        spec, table, tp, params = load.spec, load.table, load.tp, self.params
        first, last, layers, tokens, edge, plain = (
            params.is_first,
            params.is_last,
            params.num_layers,
            load.tokens,
            load.edge,
            load.plain,
        )
        weight_bytes, holds = bytes_per_value(table.dtype), layers > 0
        share = tp if spec.module == LLM else 1
        inputs = np.minimum(edge, weight_bytes * spec.num_input_values / share * tokens)
        # What a stage received is the input of its first layer, which a layer that recomputes keeps anyway.
        is_received = holds & ~first & ((again == 0) | (np.asarray(offloaded) > 0))
        crossings = 1.0 * (holds & ~last) + is_received
        heaviest = params.most_kept * plain
        of_layers = np.minimum((layers - again - offloaded) * heaviest, params.kept * plain) + again * load.again
        kept = of_layers + last * (edge - inputs) + first * inputs * (table.trains_layers or spec.module == LLM)
        message = weight_bytes * spec.hidden_size / share * tokens
        kept = np.ceil(kept + crossings * message)
        # Of layers behind those that keep nothing one is let go of by then, with as much as one of these has anew. Of
        # the host's the next one is there, too; until their copies are over, the last ones still are.
        waiting = np.minimum(offloaded, NUM_WAITING)
        anew = np.maximum(waiting, 1 * (holds & (again + offloaded == layers)) + (np.asarray(offloaded) > 1))
        # While a layer is at work, nothing is kept of what is behind; while what is before the layers is, nothing.
        work = _layer_at_work(spec, table, params, tokens, tp) + anew * heaviest - last * (edge - inputs)
        # A convolution over patches takes them apart once more for its gradient.
        entry = (_gradient_bytes(table) * params.entry + first * inputs) * table.trains_layers - kept
        # Meanwhile what the next microbatch or gradient brings from a neighbour comes in.
        comes = message * (holds.sum(axis=1, keepdims=True) > 1)
        ends = _ends_at_work(spec, table, params, load.num_lost, tp) + waiting * heaviest
        # Behind frozen layers nothing is gathered but what is counted as held.
        behind = ends + self.passing * (params.trained_ends(table) > 0)
        once = np.maximum(np.maximum(work, entry) + self.passing, behind)
        return StageBytes(*self.held, kept=kept, once=np.ceil(holds * (comes + once)))


def layer_bytes(spec: ModuleSpec, cost: CostModel, load: Floats, mode: RunMode) -> Floats:
    """`[C]`: what a layer keeps of a microbatch `[3, C]`, with context parallelism received keys and values, too.

    They are of one sample, the one that was cut where a rank's tokens begin, or of frames, which are no longer than the
    root of their squares' sum; and of other ranks' tokens. Of a layer with a state ranks keep an even part each of what
    samples have that are cut, in place of their own tokens': most has a rank whose own are of whole samples. With
    expert parallelism the rank whose experts get most rows keeps more than its own tokens'.
    """
    found = cost.activation_bytes(spec.module, load, mode, num_layers=1, edge=False)
    table = cost.table(spec.module, mode)
    is_cut = spec.module == LLM or (spec.merge_tokens and (table.trains_layers or table.trains_adapters))
    if mode.cp > 1 and is_cut and not mode.recompute:
        tokens = np.minimum(load[1] * (mode.cp - 1) / mode.cp, np.sqrt(load[2]))
        others = (mode.cp - 1) / mode.cp * np.minimum(tokens, load[1] / mode.cp)
        received = 2 * spec.key_width / mode.tp * tokens + spec.state_width * others
        found = found + bytes_per_value(table.dtype) * received
    if mode.ep > 1 and not mode.recompute:
        found = found + uneven_bytes_per_token(spec, bytes_per_value(table.dtype)) * load[1] / (mode.cp * mode.tp)
    return found


def passing_bytes(params: StageParams, table: CostTable) -> Floats:
    """Bytes of sharded parameters that a replica holds whole for a while: gathered weights, gradients of one layer."""
    weights, gradients = params.passing(table)
    found: Floats = bytes_per_value(table.dtype) * weights + _gradient_bytes(table) * gradients
    return found


def _state(
    params: StageParams, table: CostTable, replicas: Ints, shard_optimizer: Bools, shards: Ints
) -> tuple[Floats, Floats, Floats, Floats]:
    """The first four fields of `StageBytes`; replicas and what they share out are `[C, 1]`."""
    weight_bytes, trained = bytes_per_value(table.dtype), params.trained(table)
    is_sharded = shards > 1
    is_shared = shard_optimizer & ~is_sharded
    shared = params.shared(table)
    held = params.total - shared + params.ends(table)
    least = 1.0 * np.where(is_shared, params.least_owned(table, replicas), 0)
    num_states = 2 + params.num_averages + ((weight_bytes < FLOAT32_BYTES) & ~is_sharded)
    whole = params.whole_experts(table)
    others = (params.experts * table.trains_layers - whole) if params.ep > 1 else 0  # experts of other replicas
    among = np.where(is_sharded, shards, np.where(is_shared, replicas, 1))
    mean = (trained - others * (among == 1)) / among
    rows = weight_bytes * (shared - trained) / shards + FLOAT32_BYTES * mean
    weights = np.where(is_sharded, weight_bytes * (held + whole) + rows, weight_bytes * (params.total - others))
    gradients = FLOAT32_BYTES * np.where(is_sharded, mean + whole, trained - others)
    parts = (weights, gradients, FLOAT32_BYTES * num_states * mean, FLOAT32_BYTES * num_states * least)
    held_weights, held_gradients, optimizer, owned = (np.ceil(part.astype(np.float64)) for part in parts)
    return held_weights, held_gradients, optimizer, owned


def _gradient_bytes(table: CostTable) -> int:
    """Per parameter while its gradient is made: in the type of the weights, then in float32, which is added up."""
    weight_bytes = bytes_per_value(table.dtype)
    return FLOAT32_BYTES + (weight_bytes if weight_bytes < FLOAT32_BYTES else 0)


def _layer_at_work(spec: ModuleSpec, table: CostTable, params: StageParams, tokens: Floats, tp: int) -> Floats:
    """What a layer needs on top of what it keeps: gradients inside its MLP, with that of its last matrix.

    A frozen encoder's layer needs all that it then lets go of.
    """
    weight_bytes = bytes_per_value(table.dtype)
    if not table.trains_layers and not table.trains_adapters and table.module != LLM:
        shared = 2 * spec.most(
            lambda of: of.query_width + of.key_width + of.num_norm_values + of.num_mlp_tensors * of.mlp_width
        )
        num_gathered = 2 * spec.hidden_size * (tp > 1)
        return weight_bytes * (spec.num_input_values + shared / tp + num_gathered) * tokens
    inside = weight_bytes * spec.most(lambda kind: kind.mlp_width) / tp * tokens
    is_gated = spec.most(lambda kind: kind.is_gated_mlp)
    trained, most = params.matrix * table.trains_layers, 2 + is_gated
    found: Floats = np.maximum(
        most * inside + weight_bytes * trained, (most - 1) * inside + _gradient_bytes(table) * trained
    )
    if table.fp8 != FP8_OFF:
        # The input of an MLP's last matrix is cast with its activation there, another layer's widest with itself.
        wide = spec.most(lambda kind: max(kind.query_width, kind.mlp_width)) / tp
        made = (1 + is_gated * table.trains_layers) * inside
        cast = CAST_BYTES * np.maximum(tokens * max(wide, spec.hidden_size), params.matrix)
        found = np.maximum(found, made + cast + spec.hidden_size * tokens)
    hidden = weight_bytes * spec.hidden_size * tokens
    # The gradient of the layer's output; and, gathered, the input of attention or MLP and the gradient of its output.
    passed = hidden / tp + 2 * hidden * (tp > 1)
    # Gradients of one input by the base and by adapters of two Linears, until they are summed.
    inputs = 2 * hidden * table.trains_adapters
    dropped = np.maximum(inside, hidden) * table.trains_adapters
    found += passed + inputs + dropped * spec.has_adapter_dropout
    return found


def _ends_at_work(spec: ModuleSpec, table: CostTable, params: StageParams, num_lost: Floats, tp: int) -> Floats:
    """What is behind the layers needs for a while: the loss of so many tokens, or the gradient of a projector."""
    trains, num_rows = not (table.is_frozen or table.trains_adapters), -(-spec.vocab_size // tp)
    found: Floats = np.float64(_gradient_bytes(table) * trains) * params.behind_matrix
    if table.module == LLM:
        loss = loss_peak_bytes(num_lost, num_rows, spec.hidden_size, bytes_per_value(table.dtype), trains=trains)
        found = params.is_last * loss
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
