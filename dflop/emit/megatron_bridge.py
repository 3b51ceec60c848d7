"""A plan as overrides of a Megatron-Bridge recipe for vision-language models, whose modules share ranks.

The LLM is cut into pipeline stages, and encoders are on the first one, as Megatron-Bridge builds them. Samples of a
microbatch are packed into one row. Read for it: `run_recipe.py`, `config.py` and `direct_hf_sft.py` of Megatron-Bridge
0.7.0 (067f987), and the configuration classes of Megatron Core at 2a75ac1.
"""

from __future__ import annotations

from typing import Any

from dflop.errors import ConfigError
from dflop.records import LLM, ClusterSpec, Plan

SCRIPT = """#!/bin/bash
{comments}
# On every node, in a checkout of Megatron-Bridge:
#     NODE_RANK=0 MASTER_ADDR=host0 bash bridge.sh --recipe RECIPE --mode sft [more options] [KEY=VALUE ...]
set -euo pipefail

exec torchrun --nnodes={nodes} --nproc-per-node={each} --node-rank="${{NODE_RANK:-0}}" \\
    --master-addr="${{MASTER_ADDR:-127.0.0.1}}" --master-port="${{MASTER_PORT:-29500}}" \\
    scripts/training/run_recipe.py \\
{overrides} \\
    "$@"
"""


def emit_megatron_bridge(plan: Plan, cluster: ClusterSpec) -> str:
    """A shell script round `run_recipe.py`.

    Args:
        plan: Of one grid.
        cluster: That it was made for.

    Raises:
        ConfigError: Megatron-Bridge has no keys for the plan; lists why.
    """
    if problems := bridge_problems(plan, cluster):
        raise ConfigError(
            f"plan `{plan.plan_id}` is none of Megatron-Bridge's:\n  " + "\n  ".join(problems),
            where="--emit megatron-bridge", hint="plan again with --emit megatron-bridge, which keeps to its keys",
        )  # fmt: skip
    each = min(cluster.num_processes_per_node, plan.num_processes)
    overrides = " \\\n".join(f"    '{key}={_text(value)}'" for key, value in _overrides(plan).items())
    comments = "\n".join(f"# {line}" for line in _comments(plan))
    return SCRIPT.format(comments=comments, overrides=overrides, nodes=plan.num_processes // each, each=each)


def bridge_problems(plan: Plan, cluster: ClusterSpec) -> list[str]:
    """Why Megatron-Bridge has no keys for a plan, in words; empty where it has."""
    if len(plan.grids) > 1:
        return ["modules have dedicated ranks; here all share them"]
    llm = plan.module(LLM)
    found = [
        f"`{m.module}` has layers on {m.layers_per_stage} of the stages; encoders are on the first"
        for m in plan.encoders
        if any(m.layers_per_stage[1:])
    ]
    if 0 in llm.layers_per_stage[1:]:
        found.append(f"`{LLM}` has {llm.layers_per_stage} layers per stage; only the first may have none")
    if llm.parameter_shards > 1:
        found.append(f"`{LLM}` shards parameters ({llm.sharding})")
    num_parts = plan.num_microbatches * llm.parallel.dp
    if plan.global_batch_size % num_parts:
        found.append(f"a global batch of {plan.global_batch_size} is not {num_parts} microbatches of equal size")
    if plan.num_processes % min(cluster.num_processes_per_node, plan.num_processes):
        found.append(f"{plan.num_processes} processes do not fill nodes of {cluster.num_processes_per_node}")
    return found


def _overrides(plan: Plan) -> dict[str, Any]:
    llm = plan.module(LLM)
    p = llm.parallel
    size = plan.global_batch_size // (plan.num_microbatches * p.dp)
    again, is_whole = max(llm.num_recomputed), llm.num_recomputed == llm.layers_per_stage
    return {
        "train.micro_batch_size": size,
        "train.global_batch_size": plan.global_batch_size,
        **({"dataset.seq_length": llm.max_tokens} if llm.max_tokens else {}),
        "dataset.enable_in_batch_packing": size > 1,  # which it refuses of one sample
        "model.tensor_model_parallel_size": p.tp,
        "model.sequence_parallel": p.tp > 1,
        "model.pipeline_model_parallel_size": p.pp,
        "model.pipeline_model_parallel_layout": _layout(llm.layers_per_stage),
        "model.context_parallel_size": p.cp,
        "model.expert_model_parallel_size": p.ep,
        "model.expert_tensor_parallel_size": 1,
        "model.recompute_granularity": "full" if again else None,
        "model.recompute_method": ("uniform" if is_whole else "block") if again else None,
        "model.recompute_num_layers": (1 if is_whole else again) if again else None,
        # The mean over all tokens of the global batch, else those of small microbatches count more.
        "model.calculate_per_token_loss": True,
        "ddp.average_in_collective": False,
        "ddp.use_distributed_optimizer": llm.shard_optimizer,
        "optimizer.use_distributed_optimizer": llm.shard_optimizer,
    }


def _layout(layers_per_stage: tuple[int, ...]) -> str | None:
    """As Megatron Core reads it: embedding, layers and loss, stage by stage; None: all stages have as many layers."""
    if len(set(layers_per_stage)) == 1:
        return None
    return f"E{'|'.join(f't*{n}' * (n > 0) for n in layers_per_stage)}L"


def _comments(plan: Plan) -> list[str]:
    llm = plan.module(LLM)
    p, most = llm.parallel, f" of up to {llm.max_tokens} tokens" if llm.max_tokens else ""
    return [
        f"{plan.num_processes} GPUs: tp {p.tp}, pp {p.pp}, cp {p.cp}, ep {p.ep}, dp {p.dp}.",
        f"{plan.num_microbatches} microbatches{most} per replica and step.",
        "What a plan of dflop's trainer has and this file cannot say:",
        "- microbatches balanced by cost: samples are packed as they come, so ranks wait for the slowest",
        "- that limit of tokens: Megatron-Bridge cuts samples there, and not what it packs together",
        "- recomputation in encoders, and what trains: set model.freeze_* in the recipe",
    ]


def _text(value: Any) -> str:
    """As OmegaConf reads it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
