"""Seconds of replicas' messages: behind the pipeline they agree on gradients, in it they gather shared weights.

What is sent is what `train/reduce.py` and `train/zero.py` send: an all-reduce of gradients in float32; where replicas
share out the optimizer's states, a sum to the owners in float32 and the owners' weights back in the type of the model,
each half of an all-reduce; a tied embedding that lives on two stages is summed over the replicas of both. Then the
optimizer steps. Groups that share out parameters (`train/fsdp.py`) gather weights in both passes of every microbatch
and sum gradients in its backward pass, layer by layer (`with_messages` in `simulate/step.py` says how much is exposed;
what is outside the layers is gathered once, and charged twice, as in the fit of that share); copies of such groups
all-reduce what each holds. Experts that replicas share are gathered in the first forward pass of a step and summed in
its last backward pass alone. What is frozen, an LLM, the base of adapters or a tower below a projector, is gathered and
has no gradients; a frozen encoder has none of it.

Sums begin in the last backward pass, bucket by bucket (`train/buckets.py`), and owners' weights come back under the
first forward pass, so only what passes do not hide is charged (`_left_s`). Both passes are those of an average
microbatch. Not hidden are a stage's last bucket, norms that tensor-parallel ranks sum first, a tied embedding, and
copies of FSDP2's groups. Earlier stages still compute when later ones sum, which hides more; messages slow computing
down, and share a node's links with those of tensor parallelism, which hides less. By how much was never measured:
neither is charged. All of it holds for every plan alike, those of experts included: Megatron-LM overlaps, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop.cost.analytic import AVERAGE_FRAC
from dflop.cost.identity import bytes_per_value
from dflop.cost.model import Floats
from dflop.plan.candidates import Bools
from dflop.plan.space import Problem
from dflop.plan.stage_params import (
    BUCKET_BYTES,
    FLOAT32_BYTES,
    StageParams,
    chain_params,
    entry_params,
    stage_params,
)
from dflop.records import LLM, CostTable, ModulePlan, ModuleSpec, RunMode, grids_of
from dflop.schedule.items import Ints

MOST_NODES = 1 << 20
"""Above any number of nodes."""


def plan_sync_s(problem: Problem, modules: Sequence[ModulePlan], num_microbatches: int) -> float:
    """Seconds of the slowest stage of any module; modules on the same ranks share their stages."""
    found = []
    for chain in grids_of(modules):
        specs, mode = [problem.spec(m.module) for m in chain], chain[0].parallel.mode
        found.append(
            chain_sync_s(
                problem,
                specs,
                chain_params(specs, np.array([[m.layers_per_stage] for m in chain]), mode),
                np.array([[_always_rerun(m)] for m in chain]),
                num_microbatches,
                mode,
                dp=np.array([chain[0].parallel.dp]),
                shard_optimizer=np.array([chain[0].shard_optimizer]),
                shards=np.array([chain[0].parameter_shards]),
                first_rank=chain[0].first_rank,
            )
        )
    return float(np.max(found))


def _always_rerun(m: ModulePlan) -> tuple[int, ...]:
    """Layers per stage that are recomputed even in a small microbatch, which the last one may be."""
    return (0,) * m.parallel.pp if m.recompute_tokens else m.num_recomputed


def with_gathers(problem: Problem, modules: Sequence[ModulePlan]) -> tuple[ModulePlan, ...]:
    """Modules with the seconds of their groups' messages, where they have groups."""
    found = []
    for m in modules:
        if m.parameter_shards > 1:
            spec, mode = problem.spec(m.module), m.parallel.mode
            gather_s, scatter_s = gather_seconds(
                problem,
                spec,
                stage_params(spec, np.array([m.layers_per_stage]), mode.tp, mode.ep),
                mode.tp,
                replicas=np.array([m.parallel.num_replicas]),
                shards=np.array([m.parameter_shards]),
                first_rank=m.first_rank,
            )
            m = dataclasses.replace(m, gather_s=tuple(gather_s[0].tolist()), scatter_s=tuple(scatter_s[0].tolist()))
        found.append(m)
    return tuple(found)


def gather_seconds(
    problem: Problem,
    spec: ModuleSpec,
    params: StageParams,
    tp: int,
    *,
    replicas: Ints,
    shards: Ints,
    first_rank: int = 0,
) -> tuple[Floats, Floats]:
    """`[C, P]` each: a group gathers the weights of a stage's layers once; it sums and shares out their gradients once.

    Each is half of an all-reduce per layer; 0 where no group shares out parameters. Shared experts are not among them.
    Two passes gather, but the layers of a frozen tower run one, and are half of each.
    """
    layers = params.num_layers
    if not (shards > 1).any():
        return np.zeros(layers.shape), np.zeros(layers.shape)
    table = problem.cost.table(spec.module, RunMode(tp))
    experts, group = params.experts * table.trains_layers, shards[:, np.newaxis]
    runs_back = table.trains_layers or table.trains_adapters or table.module == LLM
    gathered = params.shared(table) - experts - (params.layers / 2 if not runs_back else 0)
    weights = gathered, layers * (1 if runs_back else 0.5) + (params.ends(table) > 0), bytes_per_value(table.dtype)
    gradients = params.trained(table) - experts, layers * runs_back + (params.trained_ends(table) > 0), FLOAT32_BYTES
    num_nodes = _num_nodes(problem, first_rank + np.arange(layers.shape[1]) * replicas[:, np.newaxis] * tp, tp, group)
    gather_s, scatter_s = (
        _sync_seconds(problem, (group > 1) * np.maximum(sent, 0) * num_bytes / 2, shards, num_nodes, num_messages)
        for sent, num_messages, num_bytes in (weights, gradients)
    )
    return gather_s, scatter_s


def experts_gather_seconds(problem: Problem, m: ModulePlan) -> tuple[Floats, Floats]:
    """`[P]` each, as `gather_seconds`, of the experts that a rank of a planned module with shared ones has."""
    p, layers, shards = m.parallel, np.array([m.layers_per_stage]), np.array([m.parameter_shards])
    table, params = (
        problem.cost.table(m.module, RunMode(p.tp)),
        stage_params(problem.spec(m.module), layers, p.tp, p.ep),
    )
    first_of = m.first_rank + np.arange(p.pp) * p.num_replicas * p.tp
    num_nodes = _num_nodes(problem, first_of, p.tp, shards[:, np.newaxis])
    gather_s, scatter_s = _expert_seconds(problem, params, table, shards, num_nodes)
    return gather_s[0], scatter_s[0]


def chain_sync_s(
    problem: Problem,
    specs: Sequence[ModuleSpec],
    params: Sequence[StageParams],
    again: Ints,
    num_microbatches: int | Ints,
    mode: RunMode,
    *,
    dp: Ints,
    shard_optimizer: Bools,
    shards: Ints,
    first_rank: int = 0,
) -> Floats:
    """`[C]`: of the slowest stage of C layouts of modules that share ranks.

    Args:
        problem: Costs and cluster.
        specs: The modules.
        params: What stages have of each, `[C, P]`.
        again: `[modules, C, P]` layers that run again in the backward pass.
        num_microbatches: Per step; one for all or `[C]`.
        mode: Degrees.
        dp: `[C]`.
        shard_optimizer: `[C]`.
        shards: `[C]`, replicas of a group that shares out parameters.
        first_rank: Of the first stage.
    """
    tp, cp = mode.tp, mode.cp
    replicas, group = dp[:, np.newaxis] * cp, shards[:, np.newaxis]
    is_sharded, is_shared = group > 1, shard_optimizer[:, np.newaxis] & (group == 1)
    # A group is no wider than a node, so the replicas of a stage leave no node out from their first to their last.
    first_of = first_rank + np.arange(again.shape[2]) * replicas * tp
    each, num_nodes = problem.cluster.num_processes_per_node, _num_nodes(problem, first_of, tp, replicas)
    latency_s, s_per_byte = _lines(problem, dp * cp // shards, num_nodes)
    half = np.where(is_shared, 0.5, 1.0)
    sum_s = half * s_per_byte * FLOAT32_BYTES / group  # of a parameter's gradient
    at_once = BUCKET_BYTES / FLOAT32_BYTES * np.where(is_shared, replicas, 1)
    left_s, forward_s, sent_s, tied_bytes, optimizer_s, late, summed = (np.zeros(again.shape[1:]) for _ in range(7))
    experts_s: Floats = np.zeros(again.shape[1:])
    for spec, own, of_again in reversed(list(zip(specs, params, again, strict=True))):  # as a backward pass runs
        table, first = problem.cost.table(spec.module, mode), own.is_first
        trained, owned = own.trained(table), own.least_owned(table, replicas)
        tied = (first ^ own.is_last) * spec.is_tied * table.trains_layers * entry_params(spec, tp)
        norms = 2 * spec.hidden_size * own.num_layers * table.trains_layers * (tp > 1)
        entry = (own.entry - first * tied) * table.trains_layers
        experts = own.experts * table.trains_layers if mode.ep > 1 else 0
        early = trained - tied - norms - entry - experts * ~is_sharded
        passes_s = _passes_s(problem, spec, own, of_again, num_microbatches * dp, mode) * ~is_sharded
        # What is in front of the layers, an embedding most of all, gets its gradient when the module's pass ends.
        left_s = _left_s(left_s, sum_s * early, passes_s[1], early / at_once) + sum_s * entry
        forward_s += passes_s[0]
        sent_s += is_shared * s_per_byte / 2 * (trained - experts) * bytes_per_value(table.dtype)
        tied_bytes += tied * FLOAT32_BYTES / group
        updated: Floats = np.where(is_shared, np.maximum(trained / replicas, owned), trained)
        averaging = 1 + AVERAGE_FRAC * own.num_averages
        optimizer_s += averaging * table.optimizer_s_per_param * np.where(is_sharded, trained / group, updated)
        late, summed = late + norms, summed + early + entry
        if mode.ep > 1:
            sharing = np.where(shards > 1, shards, dp * cp)
            spread = _num_nodes(problem, first_of, tp, sharing[:, np.newaxis])
            whole_s = _expert_seconds(problem, own, table, sharing, spread)
            of_passes_s = _passes_s(problem, spec, own, of_again, num_microbatches * dp, mode)
            for message_s, pass_s in zip(whole_s, of_passes_s, strict=True):
                experts_s += _left_s(np.zeros(()), message_s, pass_s, own.num_layers)
    seconds = np.maximum(left_s, sum_s * np.minimum(summed, at_once)) + sum_s * late
    seconds += half * latency_s * (1.0 * (summed > 0) + (late > 0)) + optimizer_s + experts_s
    # Weights come in the order in which the first forward pass wants them: as the last backward pass, reversed.
    seconds += _left_s(np.zeros(()), sent_s, forward_s, summed / at_once) + latency_s / 2 * (sent_s > 0)
    if tied_bytes.any():
        is_one_node = first_of[:, -1:] // each == first_rank // each
        seconds += _sync_seconds(problem, tied_bytes, 2 * dp * cp, np.where(is_one_node, 1, 2 * num_nodes))
    slowest_s: Floats = seconds.max(axis=1)
    return slowest_s


def _expert_seconds(
    problem: Problem, params: StageParams, table: CostTable, shards: Ints, num_nodes: Ints
) -> tuple[Floats, Floats]:
    """`[C, P]` each: weights of a rank's experts come from the ranks with the same once; gradients are summed once.

    Their ranks are `ep` apart, and those of a node have different experts: all of them use the network at once.
    """
    whole = params.whole_experts(table)
    weights_s, gradients_s = (
        _sync_seconds(problem, whole * num_bytes / 2, np.maximum(shards // params.ep, 1), num_nodes, params.num_layers)
        for num_bytes in (bytes_per_value(table.dtype), FLOAT32_BYTES)
    )
    return weights_s, gradients_s


def _left_s(before_s: Floats, messages_s: Floats, pass_s: Floats, num_rounds: Floats) -> Floats:
    """Seconds of messages that are left when a pass that makes their content evenly ends.

    They queue: behind `before_s` of earlier ones, none before the first round of buckets is full, the last round not
    before the pass ends.

    Args:
        before_s: Left of what was there when the pass began.
        messages_s: What the pass makes.
        pass_s: How long it takes.
        num_rounds: Equal rounds in which messages come; below 1: all of them when it ends.
    """
    rounds = np.maximum(num_rounds, 1.0)
    found: Floats = np.maximum(np.maximum(before_s, pass_s / rounds) + messages_s - pass_s, messages_s / rounds)
    return found


def _passes_s(
    problem: Problem, spec: ModuleSpec, params: StageParams, again: Ints, num_buckets: Ints, mode: RunMode
) -> Floats:
    """`[2, C, P]`: forward and backward pass of stages on the average of `[C]` buckets."""
    which = np.minimum(num_buckets, problem.global_batch_size) - 1
    layer_s, edge_s = (part[:, which, np.newaxis] for part in _known_passes(problem, spec, mode))
    found: Floats = params.num_layers * layer_s + params.is_last * edge_s
    if again.any():
        again_s, _ = _known_passes(problem, spec, mode.recomputing(True))
        found += again * (again_s[:, which, np.newaxis] - layer_s)
    return found


def average_passes_s(problem: Problem, spec: ModuleSpec, mode: RunMode, num_buckets: Ints) -> Floats:
    """`[2, C]`: forward and backward pass of a layer on the average of `[C]` buckets."""
    which = np.minimum(num_buckets, problem.global_batch_size) - 1
    return _known_passes(problem, spec, mode)[0][:, which]


def _known_passes(problem: Problem, spec: ModuleSpec, mode: RunMode) -> tuple[Floats, Floats]:
    """(of a layer, of the edge) `[2, B]`: forward and backward on the average of 1 to B buckets, a sample each."""

    def passes() -> tuple[Floats, Floats]:
        num_buckets = np.arange(1, problem.global_batch_size + 1)
        load = problem.sample_loads[spec.module].per_microbatch(num_buckets).mean(axis=-1)
        layer, edge = (
            problem.cost.module_seconds(spec.module, load, mode, num_layers=1 - is_edge, edge=is_edge)
            for is_edge in (False, True)
        )
        return np.stack(layer), np.stack(edge)

    return problem.once(("passes", spec.module, mode), passes)


def _num_nodes(problem: Problem, first_rank: Ints, tp: int, num_replicas: Ints) -> Ints:
    """Nodes of so many replicas from a rank on."""
    each = problem.cluster.num_processes_per_node
    found: Ints = (first_rank + (num_replicas - 1) * tp) // each - first_rank // each + 1
    return found


def _sync_seconds(
    problem: Problem, num_bytes: Floats, dp: Ints, num_nodes: Ints, num_messages: npt.ArrayLike = 1
) -> Floats:
    """`[C, P]`: `CostModel.sync_seconds` of gradients `[C, P]` over `[C]` replicas on `[C, P]` nodes, in messages."""
    latency_s, s_per_byte = _lines(problem, dp, num_nodes)
    found: Floats = np.where(num_bytes > 0, num_messages * latency_s + s_per_byte * num_bytes, 0.0)
    return found


def _lines(problem: Problem, dp: Ints, num_nodes: Ints) -> Floats:
    """`[2, C, P]`: latency and seconds per byte of an all-reduce over `[C]` replicas on `[C, P]` nodes."""
    known: dict[int, tuple[float, float]] = problem.once(("sync lines",), dict)
    groups = (dp[:, np.newaxis] * MOST_NODES + num_nodes).ravel().tolist()
    for group in set(groups) - known.keys():
        known[group] = _line(problem, *divmod(group, MOST_NODES))
    return np.array([known[group] for group in groups]).T.reshape(2, *num_nodes.shape)


def _line(problem: Problem, dp: int, num_nodes: int) -> tuple[float, float]:
    """(latency, seconds per byte) of a synchronisation: linear in bytes, so asked for twice."""
    few, many = 1e3, 1e9
    few_s, many_s = (problem.cost.sync_seconds(size, dp, num_nodes) for size in (few, many))
    s_per_byte = (many_s - few_s) / (many - few)
    return few_s - s_per_byte * few, s_per_byte
