"""Seconds behind the pipeline: replicas agree on their gradients, then the optimizer steps.

Nothing of it is taken to hide behind the backward pass, and groups of ranks not to disturb each other. Sharing out
the optimizer's states sends as much as an all-reduce does, half before the step and half after it, and divides the
step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import Candidates
from dflop.plan.memory import ends_and_edge, stage_params
from dflop.plan.space import Problem
from dflop.records import ModulePlan
from dflop.schedule.items import Ints


def plan_sync_s(problem: Problem, modules: Sequence[ModulePlan]) -> float:
    """Of the slowest stage of any module; modules on the same ranks (layout `inline`) share their stages."""
    chains: dict[int, list[ModulePlan]] = {}
    for m in modules:
        chains.setdefault(m.first_rank, []).append(m)
    return max(_chain_sync_s(problem, chain) for chain in chains.values())


def _chain_sync_s(problem: Problem, modules: Sequence[ModulePlan]) -> float:
    parallel, first_rank = modules[0].parallel, modules[0].first_rank
    num_bytes, optimizer_s = np.zeros(parallel.pp), np.zeros(parallel.pp)
    for m in modules:
        table = problem.cost.table(m.module, parallel.tp, m.recompute)
        if table.is_frozen:
            continue
        layers = np.array(m.layers_per_stage)
        ends, _ = ends_and_edge(layers)
        num_bytes += layers * table.layer_param_bytes + ends * table.edge_param_bytes
        share = parallel.dp if m.shard_optimizer else 1
        params = stage_params(problem.spec(m.module), layers, parallel.tp)
        optimizer_s += table.optimizer_s_per_param * params / share
    each = problem.cluster.num_processes_per_node
    slowest_s = 0.0
    for stage in range(parallel.pp):
        ranks = first_rank + (stage * parallel.dp + np.arange(parallel.dp)) * parallel.tp
        num_nodes = len(np.unique(ranks // each))
        sync_s = problem.cost.sync_seconds(float(num_bytes[stage]), parallel.dp, num_nodes)
        slowest_s = max(slowest_s, sync_s + float(optimizer_s[stage]))
    return slowest_s


def candidate_sync_s(candidates: Candidates, problem: Problem) -> Floats:
    """`[C]`: what `plan_sync_s` is for candidates whose ranks begin with a node."""
    cost, spec, layers = problem.cost, candidates.spec, candidates.layers
    ends, _ = ends_and_edge(layers)
    num_bytes, optimizer_s = np.zeros(layers.shape), np.zeros(layers.shape)
    for tp, way in sorted(set(zip(candidates.tp.tolist(), candidates.recompute.tolist(), strict=True))):
        table = cost.table(spec.module, tp, way)
        if table.is_frozen:
            continue
        rows = np.flatnonzero((candidates.tp == tp) & (candidates.recompute == way))
        num_bytes[rows] = layers[rows] * table.layer_param_bytes + ends[rows] * table.edge_param_bytes
        optimizer_s[rows] = table.optimizer_s_per_param * stage_params(spec, layers[rows], tp)
    optimizer_s /= np.where(candidates.shard_optimizer, candidates.dp, 1)[:, np.newaxis]
    num_nodes = -(-candidates.tp * candidates.dp // problem.cluster.num_processes_per_node)
    found: Floats = (sync_seconds(problem, num_bytes, candidates.dp, num_nodes) + optimizer_s).max(axis=1)
    return found


def sync_seconds(problem: Problem, num_bytes: Floats, dp: Ints, num_nodes: Ints) -> Floats:
    """`[C, P]`: `CostModel.sync_seconds` of gradients `[C, P]` over `[C]` replicas on `[C]` nodes."""
    groups, which = np.unique(np.stack([dp, num_nodes]), axis=1, return_inverse=True)
    lines = np.array([_line(problem, int(d), int(n)) for d, n in groups.T]).reshape(-1, 2)
    latency_s, s_per_byte = lines[which.reshape(-1)].T[:, :, np.newaxis]
    return np.where(num_bytes > 0, latency_s + s_per_byte * num_bytes, 0.0)


def _line(problem: Problem, dp: int, num_nodes: int) -> tuple[float, float]:
    """(latency, seconds per byte) of a synchronisation: linear in bytes, so asked for twice, and once per group."""
    if (dp, num_nodes) not in problem.sync_lines:
        few, many = 1e3, 1e9
        few_s, many_s = (problem.cost.sync_seconds(size, dp, num_nodes) for size in (few, many))
        s_per_byte = (many_s - few_s) / (many - few)
        problem.sync_lines[dp, num_nodes] = few_s - s_per_byte * few, s_per_byte
    return problem.sync_lines[dp, num_nodes]
