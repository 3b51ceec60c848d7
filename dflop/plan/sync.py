"""Seconds of replicas' messages: behind the pipeline they agree on gradients, in it they gather shared weights.

Nothing of the former is taken to hide behind the backward pass, and groups of ranks not to disturb each other. What is
sent is what `train/reduce.py` and `train/zero.py` send: an all-reduce of gradients in float32; where replicas share out
the optimizer's states, a sum to the owners in float32 and the owners' weights back in the type of the model, each half
of an all-reduce; a tied embedding that lives on two stages is summed over the replicas of both. Then the optimizer
steps. Groups that share out parameters (`train/fsdp.py`) gather weights in both passes of every microbatch and sum
gradients in its backward pass, layer by layer; copies of such groups all-reduce what each holds. Frozen modules have
none of it, and of an encoder with a frozen tower its projector alone has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop.cost.identity import bytes_per_value
from dflop.cost.model import Floats
from dflop.cost.towers import trains_layers
from dflop.plan.candidates import Bools, Candidates
from dflop.plan.memory import FLOAT32_BYTES
from dflop.plan.space import Problem
from dflop.plan.stage_params import first_and_last, stage_params
from dflop.records import ModulePlan, ModuleSpec
from dflop.schedule.items import Ints


def plan_sync_s(problem: Problem, modules: Sequence[ModulePlan]) -> float:
    """Of the slowest stage of any module; modules on the same ranks (layout `inline`) share their stages."""
    chains: dict[int, list[ModulePlan]] = {}
    for m in modules:
        chains.setdefault(m.first_rank, []).append(m)
    return max(
        float(
            chain_sync_s(
                problem,
                [problem.spec(m.module) for m in chain],
                np.array([[m.layers_per_stage] for m in chain]),
                tp=chain[0].parallel.tp,
                dp=np.array([chain[0].parallel.dp]),
                shard_optimizer=np.array([chain[0].shard_optimizer]),
                shards=np.array([chain[0].parameter_shards]),
                first_rank=first_rank,
            )[0]
        )
        for first_rank, chain in chains.items()
    )


def with_gathers(problem: Problem, modules: Sequence[ModulePlan]) -> tuple[ModulePlan, ...]:
    """Modules with the seconds of their groups' messages, where they have groups."""
    found = []
    for m in modules:
        if m.parameter_shards > 1:
            gather_s, scatter_s = gather_seconds(
                problem,
                problem.spec(m.module),
                np.array([m.layers_per_stage]),
                tp=m.parallel.tp,
                dp=np.array([m.parallel.dp]),
                shards=np.array([m.parameter_shards]),
                first_rank=m.first_rank,
            )
            m = dataclasses.replace(m, gather_s=tuple(gather_s[0].tolist()), scatter_s=tuple(scatter_s[0].tolist()))
        found.append(m)
    return tuple(found)


def gather_seconds(
    problem: Problem,
    spec: ModuleSpec,
    layers: Ints,
    *,
    tp: int,
    dp: Ints,
    shards: Ints,
    first_rank: int = 0,
) -> tuple[Floats, Floats]:
    """`[C, P]` each: a group gathers the weights of a stage's layers once; it sums and shares out their gradients once.

    Each is half of an all-reduce per layer; 0 where no group shares out parameters.
    """
    table, params = problem.cost.table(spec.module, tp), stage_params(spec, layers, tp)
    trained, group = params.trained(table), shards[:, np.newaxis]
    num_units = layers * trains_layers(table) + (params.ends(table) > 0)
    num_nodes = _num_nodes(problem, first_rank + np.arange(layers.shape[1]) * dp[:, np.newaxis] * tp, tp, group)
    is_sent = (group > 1) & (trained > 0)
    gather_s, scatter_s = (
        _sync_seconds(problem, is_sent * trained * num_bytes / 2, shards, num_nodes, num_units)
        for num_bytes in (bytes_per_value(table.dtype), FLOAT32_BYTES)
    )
    return gather_s, scatter_s


def candidate_sync_s(candidates: Candidates, problem: Problem) -> Floats:
    """`[C]`: that of candidates whose ranks begin with a node."""
    found, layers = np.zeros(len(candidates)), candidates.layers
    for tp, _, rows in candidates.groups():
        found[rows] = chain_sync_s(
            problem,
            [candidates.spec],
            layers[np.newaxis, rows],
            tp=tp,
            dp=candidates.dp[rows],
            shard_optimizer=candidates.shard_optimizer[rows],
            shards=candidates.shards[rows],
        )
    return found


def chain_sync_s(
    problem: Problem,
    specs: Sequence[ModuleSpec],
    layers: Ints,
    *,
    tp: int,
    dp: Ints,
    shard_optimizer: Bools,
    shards: Ints,
    first_rank: int = 0,
) -> Floats:
    """`[C]`: of the slowest stage of C layouts of modules that share ranks.

    Args:
        problem: Costs and cluster.
        specs: The modules.
        layers: `[modules, C, P]` layers per stage.
        tp: Tensor-parallel degree.
        dp: `[C]`.
        shard_optimizer: `[C]`.
        shards: `[C]`, replicas of a group that shares out parameters.
        first_rank: Of the first stage.
    """
    num_bytes, tied_bytes, optimizer_s = (np.zeros(layers.shape[1:]) for _ in range(3))
    replicas, group = dp[:, np.newaxis], shards[:, np.newaxis]
    is_sharded, is_shared = group > 1, shard_optimizer[:, np.newaxis]
    for spec, of_module in zip(specs, layers, strict=True):
        table, params = problem.cost.table(spec.module, tp), stage_params(spec, of_module, tp)
        trained = params.trained(table)
        shared_bytes, owned = FLOAT32_BYTES + bytes_per_value(table.dtype), params.least_owned(table, replicas)
        per_param: Floats = np.where(is_shared, shared_bytes / 2, FLOAT32_BYTES)
        updated: Floats = np.where(is_shared, np.maximum(trained / replicas, owned), trained)
        per_param = np.where(is_sharded, FLOAT32_BYTES / group, per_param)
        updated = np.where(is_sharded, trained / group, updated)
        first, last = first_and_last(of_module)
        tied = (first ^ last) * spec.is_tied * (trained > 0) * spec.num_entry_params
        num_bytes += (trained - tied) * per_param
        tied_bytes += tied * FLOAT32_BYTES / group
        optimizer_s += table.optimizer_s_per_param * updated
    # A group is no wider than a node, so the replicas of a stage leave no node out from their first to their last.
    first_of = first_rank + np.arange(layers.shape[2]) * replicas * tp
    each, num_nodes = problem.cluster.num_processes_per_node, _num_nodes(problem, first_of, tp, replicas)
    seconds = _sync_seconds(problem, num_bytes, dp // shards, num_nodes) + optimizer_s
    if tied_bytes.any():
        is_one_node = first_of[:, -1:] // each == first_rank // each
        seconds += _sync_seconds(problem, tied_bytes, 2 * dp, np.where(is_one_node, 1, 2 * num_nodes))
    slowest_s: Floats = seconds.max(axis=1)
    return slowest_s


def _num_nodes(problem: Problem, first_rank: Ints, tp: int, num_replicas: Ints) -> Ints:
    """Nodes of so many replicas from a rank on."""
    each = problem.cluster.num_processes_per_node
    found: Ints = (first_rank + (num_replicas - 1) * tp) // each - first_rank // each + 1
    return found


def _sync_seconds(
    problem: Problem, num_bytes: Floats, dp: Ints, num_nodes: Ints, num_messages: npt.ArrayLike = 1
) -> Floats:
    """`[C, P]`: `CostModel.sync_seconds` of gradients `[C, P]` over `[C]` replicas on `[C, P]` nodes, in messages."""
    base = int(num_nodes.max()) + 1
    groups, which = np.unique(dp[:, np.newaxis] * base + num_nodes, return_inverse=True)
    lines = np.array([_line(problem, *divmod(group, base)) for group in groups.tolist()])
    latency_s, s_per_byte = lines.T[:, which.reshape(num_nodes.shape)]
    found: Floats = np.where(num_bytes > 0, num_messages * latency_s + s_per_byte * num_bytes, 0.0)
    return found


def _line(problem: Problem, dp: int, num_nodes: int) -> tuple[float, float]:
    """(latency, seconds per byte) of a synchronisation: linear in bytes, so asked for twice, and once per group."""
    if (dp, num_nodes) not in problem.sync_lines:
        few, many = 1e3, 1e9
        few_s, many_s = (problem.cost.sync_seconds(size, dp, num_nodes) for size in (few, many))
        s_per_byte = (many_s - few_s) / (many - few)
        problem.sync_lines[dp, num_nodes] = few_s - s_per_byte * few, s_per_byte
    return problem.sync_lines[dp, num_nodes]
