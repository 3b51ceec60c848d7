"""A plan as configuration of trainers that pack samples: VeOmni, ms-swift and torchtitan.

Their keys hold degrees, packs and whether layers are recomputed. What this project's plans have and they do not, stands
in the comments of the file. Read for it: `arguments_types.py` of VeOmni 0.1.12 with `parallel_state.py` (ranks of a
Ulysses group share out weights together with the replicas), the argument classes of ms-swift 4.6.0 with its
`fsdp2.json`, and `ParallelismConfig` of torchtitan 0.3.0. The parser of ms-swift 4.6.0 took the script's arguments, and
made its FSDP2 configuration of them (30 November 2026; packages that it imports were stubs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflop.emit.plain_yaml import yaml_text
from dflop.records import LLM, ClusterSpec, ModulePlan, Plan

UNSAID = (
    "microbatches balanced by cost: samples are packed as they come, so ranks wait for the slowest",
    "recomputation of some layers or microbatches, activations on the host: all layers or none",
    "ranks of a module alone, and what trains: set frozen modules in the trainer",
)
VEOMNI = """# Merge it into your configuration with model.model_path and data.train_path:
#     torchrun --nnodes={nodes} --nproc-per-node={each} --node-rank=... tasks/train_vlm.py merged.yaml
"""
SWIFT = """#!/bin/bash
{comments}
# On every node: NODE_RANK=0 MASTER_ADDR=host0 bash swift.sh --model MODEL --dataset DATA [more of ms-swift's arguments]
set -euo pipefail

export NNODES={nodes} NPROC_PER_NODE={each}
exec swift sft \\
{options} \\
    "$@"
"""
TITAN = """#!/bin/bash
{comments}
# On every node, with the model that torchtitan has it for:
#     NODE_RANK=0 MASTER_ADDR=host0 bash titan.sh --module qwen3_5 --config qwen35_9b
set -euo pipefail

exec torchrun --nnodes={nodes} --nproc-per-node={each} --node-rank="${{NODE_RANK:-0}}" \\
    --master-addr="${{MASTER_ADDR:-127.0.0.1}}" --master-port="${{MASTER_PORT:-29500}}" \\
    -m torchtitan.train "$@" \\
{options} \\
    activation_checkpoint:{recompute}
"""


def emit_veomni(plan: Plan, cluster: ClusterSpec) -> str:
    """VeOmni's YAML.

    Args:
        plan: Of one grid without stages and tp; `max_tokens` of its LLM are those of a pack.
        cluster: That it was made for.
    """
    llm = plan.module(LLM)
    p = llm.parallel
    document = {
        "data": {"max_seq_len": llm.max_tokens},
        "train": {
            "dyn_bsz": True,
            "micro_batch_size": 1,
            "global_batch_size": plan.num_microbatches * p.dp,
            "init_device": "meta",
            "gradient_checkpointing": {"enable": _recomputes(plan)},
            "accelerator": {
                "dp_replicate_size": p.num_replicas // llm.parameter_shards,
                "dp_shard_size": llm.parameter_shards // p.cp,
                "ulysses_size": p.cp,
                "ep_size": p.ep,
                "fsdp_config": {"fsdp_mode": "fsdp2", "reshard_after_forward": True},
            },
        },
    }
    return f"{_comments(plan)}\n{VEOMNI.format(**_nodes(cluster))}{yaml_text(document)}"


def emit_ms_swift(plan: Plan, cluster: ClusterSpec) -> str:
    """A shell script round `swift sft`; arguments as of `emit_veomni`, with FSDP2 over all ranks."""
    llm = plan.module(LLM)
    fsdp = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": _recomputes(plan),
        },
    }
    options = {
        "tuner_type": "full",  # its default is lora
        "fsdp": f"'{json.dumps(fsdp)}'",
        "gradient_checkpointing": "false",
        "vit_gradient_checkpointing": "false",
        "sequence_parallel_size": llm.parallel.cp,
        "attn_impl": "flash_attn",
        "packing": "true",
        "packing_length": llm.max_tokens,
        "max_length": llm.max_tokens,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": plan.num_microbatches,
    }
    return SWIFT.format(comments=_comments(plan), options=_options(options), **_nodes(cluster))


def emit_torchtitan(plan: Plan, cluster: ClusterSpec) -> str:
    """A shell script round torchtitan's trainer; arguments as of `emit_veomni`, tp allowed."""
    llm = plan.module(LLM)
    p = llm.parallel
    options = {
        "training.local_batch_size": 1,
        "training.global_batch_size": plan.num_microbatches * p.dp,
        "training.seq_len": llm.max_tokens,
        "parallelism.data_parallel_replicate_degree": p.num_replicas // llm.parameter_shards,
        "parallelism.data_parallel_shard_degree": llm.parameter_shards,
        "parallelism.fsdp_reshard_after_forward": "always",
        "parallelism.tensor_parallel_degree": p.tp,
        "parallelism.expert_parallel_degree": p.ep,
    }
    recompute = "full" if _recomputes(plan) else "none"
    return TITAN.format(comments=_comments(plan), options=_options(options), recompute=recompute, **_nodes(cluster))


def _recomputes(plan: Plan) -> bool:
    return any(sum(m.num_recomputed) for m in plan.modules)


def _nodes(cluster: ClusterSpec) -> dict[str, int]:
    return {"nodes": cluster.num_nodes, "each": cluster.num_processes_per_node}


def _options(options: Mapping[str, Any]) -> str:
    return " \\\n".join(f"    --{name} {value}" for name, value in options.items())


def _comments(plan: Plan) -> str:
    llm = plan.module(LLM)
    num_packs = plan.num_microbatches * llm.parallel.dp
    lines = [
        f"{plan.num_processes} GPUs, {_degrees(llm)}.",
        f"A step is {num_packs} packs of up to {llm.max_tokens} tokens, about {plan.global_batch_size} samples.",
        "What a plan of dflop's trainer has and this file cannot say:",
        *(f"- {what}" for what in UNSAID),
    ]
    return "\n".join(f"# {line}" for line in lines)


def _degrees(llm: ModulePlan) -> str:
    p = llm.parallel
    found = [llm.sharding or "one replica", *(f"{name} {n}" for name, n in (("tp", p.tp), ("ep", p.ep)) if n > 1)]
    return ", ".join([*found, f"sequence parallelism over {p.cp}"] if p.cp > 1 else found)
