"""A plan as a JSON document for other programs, and back.

The document repeats what follows from the degrees (ranks and layer bounds of every stage), so that a reader in another
language needs no arithmetic. `read_plan` gives the same `Plan` again and refuses a document whose repetitions disagree.
Numbers that JSON does not have (NaN of a step that was not simulated) are null.
"""

from __future__ import annotations

import json
import math
from typing import Any

from dflop.errors import ConfigError
from dflop.parallel.topology import rank_of
from dflop.records import ClusterSpec, ModulePlan, ParallelSpec, Plan, parse_json

SCHEMA = "dflop.plan"
VERSION, READABLE = 2, (1, 2)
"""Raised when a key changes its meaning or goes; readers ignore keys they do not know, as `layout` of version 1."""
PER_STAGE = ("recomputed", "offloaded", "gather_s", "scatter_s")
SIMULATED = ("predicted_step_s", "baseline_step_s", "uniform_step_s", "sync_s")


def emit_json(plan: Plan, cluster: ClusterSpec) -> str:
    """The document, indented; ends with a newline.

    Args:
        plan: Any layout.
        cluster: Named in the document, for people; not read back.
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


def read_plan(text: str) -> Plan:
    """Inverse of `emit_json`.

    Raises:
        ConfigError: not such a document, of another version, incomplete, or at odds with itself.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", where="plan document") from error
    found = (document.get("schema"), document.get("version")) if isinstance(document, dict) else (None, None)
    if found not in [(SCHEMA, version) for version in READABLE]:
        raise ConfigError(
            f"schema {found[0]!r}, version {found[1]!r}",
            where="plan document",
            hint=f"this dflop reads `{SCHEMA}` versions {READABLE[0]} to {VERSION}; emit the plan again",
        )
    try:
        return _plan(document)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"missing or of a wrong type: {error}", where="plan document") from error


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


def _plan(document: dict[str, Any]) -> Plan:
    plan = Plan(
        plan_id=str(document["plan_id"]),
        run_id=str(document["run_id"]),
        candidate_rank=int(document["candidate_rank"]),
        modules=tuple(_read_module(m) for m in document["modules"]),
        num_microbatches=int(document["num_microbatches"]),
        global_batch_size=int(document["global_batch_size"]),
        formula_step_s=_float(document["formula_step_s"]),
        **{name: _float(document["simulated"][name]) for name in SIMULATED},
        table_ids=tuple(document["table_ids"]),
        snapshot_seq=int(document["snapshot_seq"]),
        reason=str(document["reason"]),
    )
    if plan.num_processes != document["num_processes"]:
        raise ConfigError(
            f"num_processes is {document['num_processes']}, the modules have {plan.num_processes}",
            where="plan document",
        )
    return plan


def _read_module(entry: dict[str, Any]) -> ModulePlan:
    stages = entry["stages"]
    module = ModulePlan(
        module=str(entry["module"]),
        parallel=ParallelSpec(
            int(entry["tp"]), int(entry["pp"]), int(entry["dp"]), int(entry.get("cp", 1)), int(entry.get("ep", 1))
        ),
        first_rank=int(entry["first_rank"]),
        layers_per_stage=tuple(int(s["end_layer"]) - int(s["first_layer"]) for s in stages),
        stage_memory_bytes=tuple(int(s["memory_bytes"]) for s in stages),
        recompute=bool(entry["recompute"]),
        shard_optimizer=bool(entry["zero1"]),
        recomputed=tuple(int(n) for n in entry.get("recomputed", ())),
        offloaded=tuple(int(n) for n in entry.get("offloaded", ())),
        parameter_shards=int(entry.get("parameter_shards", 1)),
        gather_s=tuple(_float(s) for s in entry.get("gather_s", ())),
        scatter_s=tuple(_float(s) for s in entry.get("scatter_s", ())),
        max_tokens=int(entry["max_tokens"] or 0),
        cost_growth=_float(entry.get("cost_growth", 0.0)),
        recompute_tokens=tuple(tuple(map(int, limits)) for limits in entry.get("recompute_tokens", ())),
    )
    where = f"plan document, module `{module.module}`"
    p = module.parallel
    if len(stages) != p.pp:
        raise ConfigError(f"{len(stages)} stages, but pp is {p.pp}", where=where)
    # Before ranks are counted up: degrees of any size are written in a line.
    if any(len(s["ranks"]) != p.num_replicas or any(len(ranks) != p.tp for ranks in s["ranks"]) for s in stages):
        raise ConfigError(f"its stages have not dp x cp x tp = {p.num_replicas:.15g} x {p.tp:.15g} ranks", where=where)
    for number, stage in enumerate(stages):
        if stage != stage | _stage(module, number):
            raise ConfigError(
                f"stage {number} disagrees with the degrees, first rank and layers before it", where=where
            )
    return module


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _float(value: float | None) -> float:
    found = math.nan if value is None else float(value)
    if value is not None and not math.isfinite(found):
        raise ValueError(f"{value} is not a time in seconds")
    return found
