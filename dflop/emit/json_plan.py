"""A plan as a JSON document for other programs.

The document repeats what follows from the degrees (ranks and layer bounds of every stage), so that a reader in another
language needs no arithmetic. Numbers that JSON does not have (NaN of a step that was not simulated) are null.
"""

from __future__ import annotations

import json
import math
from typing import Any

from dflop.parallel.topology import rank_of
from dflop.records import ClusterSpec, ModulePlan, Plan

SCHEMA = "dflop.plan"
VERSION = 2
"""Raised when a key changes its meaning or goes; readers ignore keys they do not know."""
PER_STAGE = ("recomputed", "offloaded", "gather_s", "scatter_s")
SIMULATED = ("predicted_step_s", "baseline_step_s", "uniform_step_s", "sync_s")


def emit_json(plan: Plan, cluster: ClusterSpec) -> str:
    """The document, indented; ends with a newline.

    Args:
        plan: Any layout.
        cluster: Named in the document, for people.
    """
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "plan_id": plan.plan_id,
        "run_id": plan.run_id,
        "candidate_rank": plan.candidate_rank,
        "reason": plan.reason,
        "cluster": {"num_nodes": cluster.num_nodes, "num_processes_per_node": cluster.num_processes_per_node},
        "num_processes": plan.num_processes,
        "num_microbatches": plan.num_microbatches,
        "global_batch_size": plan.global_batch_size,
        "modules": [_module(m) for m in plan.modules],
        "simulated": {name: _number(getattr(plan, name)) for name in SIMULATED},
        "formula_step_s": _number(plan.formula_step_s),
        "table_ids": list(plan.table_ids),
        "snapshot_seq": plan.snapshot_seq,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _module(module: ModulePlan) -> dict[str, Any]:
    p = module.parallel
    return {
        "module": module.module,
        "tp": p.tp,
        "pp": p.pp,
        "dp": p.dp,
        "cp": p.cp,
        "ep": p.ep,
        "first_rank": module.first_rank,
        "recompute": module.recompute,
        **{name: list(getattr(module, name)) for name in PER_STAGE},
        "parameter_shards": module.parameter_shards,
        "zero1": module.shard_optimizer,
        "max_tokens": module.max_tokens or None,
        "cost_growth": module.cost_growth,
        "merge_tokens": module.merge_tokens,
        "recompute_tokens": [list(limits) for limits in module.recompute_tokens],
        "stages": [_stage(module, stage) for stage in range(p.pp)],
    }


def _stage(module: ModulePlan, stage: int) -> dict[str, Any]:
    p, first = module.parallel, sum(module.layers_per_stage[:stage])
    return {
        "first_layer": first,
        "end_layer": first + module.layers_per_stage[stage],
        "memory_bytes": module.stage_memory_bytes[stage],
        "ranks": [[rank_of(module, stage, d, t) for t in range(p.tp)] for d in range(p.num_replicas)],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
