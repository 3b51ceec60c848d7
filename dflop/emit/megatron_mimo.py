"""A plan as a configuration for Megatron-Bridge's MIMO, which trains every module with degrees of its own.

The file is YAML laid out like MIMO's own run configuration. What a plan says and MIMO has no field for stands in
comments at the top: token caps, which samples run together, and ZeRO-1 where modules differ. What MIMO would silently
do otherwise, `mimo_rules` refuses. How MIMO's fields are filled:

    tp, pp, dp, first rank    `module_parallelisms`, an entry per module; `llm` is `language`, `vision` `images`,
                              `audio` `audios`
    microbatches              `train.micro_batch_size`, which counts all replicas together
    uneven layers of the LLM  layers of the first and of the last stage; other splits are refused, and `nearest_layers`
                              gives the nearest
    recompute                 full, uniform, one layer; encoders take it over from the LLM, so plans in which modules
                              differ are refused
    ZeRO-1                    one switch for all modules, on when one asks for it: it costs the others no memory
    FSDP2                     refused: no field
    token caps, packing       no field: comments
    modules that share ranks  refused: ranks of modules may not overlap
"""

from __future__ import annotations

from typing import Any

from dflop import units
from dflop.emit.mimo_rules import end_layers, mimo_problems
from dflop.emit.plain_yaml import yaml_text
from dflop.errors import ConfigError
from dflop.records import LLM, ClusterSpec, ModulePlan, Plan

NAMES = {LLM: "language", "vision": "images", "audio": "audios"}
"""Module names of MIMO's providers; other encoders keep ours."""
CONFIG = "megatron.bridge.models.megatron_mimo.megatron_mimo_config"


def emit_megatron_mimo(plan: Plan, cluster: ClusterSpec) -> str:
    """The configuration.

    Args:
        plan: Layout `split`, searched under `MimoRules`.
        cluster: Must have room for the plan.

    Raises:
        ConfigError: MIMO would not accept the plan; lists every rule it breaks.
    """
    problems = mimo_problems(plan, cluster.num_processes)
    if problems:
        raise ConfigError(
            f"plan `{plan.plan_id}` is not valid for Megatron's MIMO:\n  " + "\n  ".join(problems),
            where="--emit megatron-mimo",
            hint="plan again with --emit megatron-mimo: its rules are then constraints of the search",
        )
    return render(plan)


def render(plan: Plan) -> str:
    """The file of a plan whose modules have dedicated ranks, valid or not."""
    comments = "\n".join(f"# {line}".rstrip() for line in _comments(plan))
    return f"{comments}\n\n{yaml_text(_document(plan))}"


def _document(plan: Plan) -> dict[str, Any]:
    llm = plan.module(LLM)
    first, last = end_layers(llm.layers_per_stage) or (None, None)
    language: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "recompute_granularity": "full" if llm.recompute else None,
        "recompute_method": "uniform" if llm.recompute else None,
        "recompute_num_layers": 1 if llm.recompute else None,
    }
    zero1 = {"use_distributed_optimizer": any(_shards(m) for m in plan.modules)}
    return {
        "train": {
            "micro_batch_size": plan.global_batch_size // plan.num_microbatches,
            "global_batch_size": plan.global_batch_size,
        },
        "ddp": zero1,
        "optimizer": zero1,
        "model": {
            "megatron_mimo_parallelism_config": {
                "_target_": f"{CONFIG}.MegatronMIMOParallelismConfig",
                "module_parallelisms": {_name(m): _parallelism(m) for m in plan.modules},
            },
            "standard_provider": language,
        },
    }


def _parallelism(module: ModulePlan) -> dict[str, Any]:
    p = module.parallel
    return {
        "_target_": f"{CONFIG}.ModuleParallelismConfig",
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "data_parallel_size": p.dp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "rank_offset": module.first_rank,
    }


def _comments(plan: Plan) -> list[str]:
    size = plan.global_batch_size // plan.num_microbatches
    return [
        f"Plan {' '.join(plan.plan_id.split())} for Megatron-Bridge MIMO: start {plan.num_processes} processes.",
        f"{plan.num_microbatches} microbatches of {size} samples; micro_batch_size counts all replicas together.",
        f"Simulated step: {units.seconds(plan.baseline_step_s)} with samples in arrival order, as MIMO takes them;",
        f"{units.seconds(plan.predicted_step_s)} with dflop's packing, which MIMO has no field for.",
        *(
            f"`{_name(m)}`: fits in memory as long as no rank gets more than {m.max_tokens} tokens in a microbatch, "
            "which"
            " Megatron does not enforce."
            for m in plan.modules
            if m.max_tokens
        ),
        *(
            f"`{_name(m)}`: MIMO cuts images like samples; every microbatch needs a multiple of {m.parallel.dp} images."
            for m in plan.encoders
            if m.module == "vision" and m.parallel.dp > 1
        ),
        *_zero1_comment(plan),
        "",
        "Where a script of Megatron-Bridge takes flags, these say the same:",
        *(f"  --component {_name(m)}={_flags(m)}" for m in plan.modules),
        f"  --micro-batch-size {size} --global-batch-size {plan.global_batch_size}",
        "Fields under model.standard_provider have no flag: set them on the provider before it is built.",
    ]


def _zero1_comment(plan: Plan) -> list[str]:
    """ZeRO-1 is one switch for all modules. On costs a module no memory, so one that wants it decides."""
    unasked = [_name(m) for m in plan.modules if m.parallel.dp > 1 and not m.shard_optimizer]
    if not unasked or not any(_shards(m) for m in plan.modules):
        return []
    return [f"use_distributed_optimizer applies to all modules; the plan does not use it for: {', '.join(unasked)}."]


def _shards(module: ModulePlan) -> bool:
    return module.shard_optimizer and module.parallel.dp > 1


def _flags(module: ModulePlan) -> str:
    p = module.parallel
    return f"tp={p.tp},pp={p.pp},dp={p.dp},rank_offset={module.first_rank}"


def _name(module: ModulePlan) -> str:
    return NAMES.get(module.module, module.module)
