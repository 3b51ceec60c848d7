"""Whether a MIMO configuration is valid, told from its text alone: nothing here knows a plan or the emitter's code."""

import itertools
from typing import Any

from ruamel.yaml import YAML

DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip


def parsed(text: str) -> dict[str, Any]:
    return YAML(typ="safe").load(text)


def problems_of(text: str, *, world_size: int, num_llm_layers: int) -> list[str]:
    """Names of the rules broken, in a fixed order."""
    document = parsed(text)
    config = document["model"]["megatron_mimo_parallelism_config"]
    modules: dict[str, Any] = config["module_parallelisms"]
    tp, pp, dp, cp, ep, etp = ({n: m[degree] for n, m in modules.items()} for degree in DEGREES)
    size, batch = document["train"]["micro_batch_size"], document["train"]["global_batch_size"]
    taken = [
        rank
        for name, m in modules.items()
        for rank in range(m["rank_offset"], m["rank_offset"] + tp[name] * pp[name] * dp[name] * cp[name])
    ]
    switches = {document[part]["use_distributed_optimizer"] for part in ("ddp", "optimizer")}
    types = [config["_target_"].split(".")[-1], *(m["_target_"].split(".")[-1] for m in modules.values())]
    broken = {
        "types": types != ["MegatronMIMOParallelismConfig", *["ModuleParallelismConfig"] * len(modules)],
        "language": "language" not in modules, "tp": any(bin(n).count("1") != 1 for n in tp.values()),
        "dp": any(a % b and b % a for a, b in itertools.combinations(dp.values(), 2)), "cp": set(cp.values()) != {1},
        "dense": {*ep.values(), *etp.values()} != {1},
        "encoder pp": any(n > 1 for name, n in pp.items() if name != "language"),
        "ranks": sorted(taken) != list(range(world_size)),
        "microbatches": batch % size != 0 or any(size % n for n in dp.values()),
        "layers": layers_of(document, num_llm_layers) is None, "recompute": recompute_of(document) is None,
        "zero1": switches not in ({True}, {False}),
    }  # fmt: skip
    return [rule for rule, is_broken in broken.items() if is_broken]


def layers_of(document: dict[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Layers of each stage of the language model by Megatron's arithmetic; None where it would stop."""
    fields = document["model"]["standard_provider"]
    pp = document["model"]["megatron_mimo_parallelism_config"]["module_parallelisms"]["language"][DEGREES[1]]
    first, last = fields["num_layers_in_first_pipeline_stage"], fields["num_layers_in_last_pipeline_stage"]
    ends = [n for n in (first, last) if n is not None]
    num_others = pp - len(ends)
    each, rest = divmod(num_layers - sum(ends), num_others) if num_others else (0, num_layers - sum(ends))
    if rest or (num_others and each < 1) or any(n < 1 for n in ends):
        return None
    return (*([first] if first is not None else []), *[each] * num_others, *([last] if last is not None else []))


def recompute_of(document: dict[str, Any]) -> bool | None:
    """Whether layers run again in the backward pass; None when the three fields do not belong together."""
    fields = document["model"]["standard_provider"]
    found = tuple(fields[f"recompute_{name}"] for name in ("granularity", "method", "num_layers"))
    return {("full", "uniform", 1): True, (None, None, None): False}.get(found)
