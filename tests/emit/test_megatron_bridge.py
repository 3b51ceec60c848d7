"""Overrides of a Megatron-Bridge recipe, held to the keys of its configuration classes: `trainer_keys.json`."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given

from dflop.emit.megatron_bridge import bridge_problems, emit_megatron_bridge
from dflop.errors import ConfigError
from dflop.records import LLM, ModulePlan, ParallelSpec, Plan
from tests.emit.plans import CLUSTER, inline_plans, split, split_plans
from tests.emit.test_packing_trainers import options

KEYS = json.loads((Path(__file__).parent / "trainer_keys.json").read_text())["megatron-bridge"]["keys"]


def chain(*layers: int, vision: tuple[int, ...] = (), recomputed: tuple[int, ...] = (), **degrees: int) -> Plan:
    """On 16 ranks; what is not said of the degrees are replicas."""
    pp, tp, cp, ep = len(layers), degrees.get("tp", 1), degrees.get("cp", 1), degrees.get("ep", 1)
    parallel = ParallelSpec(tp, pp, 16 // (tp * pp * cp), cp=cp, ep=ep)
    how = {"stage_memory_bytes": (1,) * pp, "shard_optimizer": True}
    modules = [ModulePlan(LLM, parallel, 0, layers, max_tokens=9000, recomputed=recomputed, **how)]
    if vision:
        modules.insert(0, ModulePlan("vision", parallel, 0, vision, **how))
    plan = split(modules[-1], num_microbatches=2, global_batch_size=32)
    return dataclasses.replace(plan, modules=tuple(modules))


def given_to_it(plan: Plan, tmp_path: Path) -> dict[str, str]:
    words = options(emit_megatron_bridge(plan, CLUSTER), tmp_path, "torchrun")
    assert words[:3] == ["--nnodes=2", "--nproc-per-node=8", "--node-rank=1"]
    assert words[5] == "scripts/training/run_recipe.py"
    assert words[-2:] == ["--more", "y"], "what a person adds comes last, and counts"
    return dict(word.split("=", 1) for word in words[6:-2])


def test_a_chain_is_said_in_keys_that_there_are(tmp_path):
    found = given_to_it(chain(6, 8, 8, 7, vision=(3, 0, 0, 0), recomputed=(0, 2, 1, 0), tp=2, ep=2), tmp_path)
    assert found.keys() <= KEYS.keys()
    assert found == found | {
        "train.micro_batch_size": "8", "train.global_batch_size": "32", "dataset.seq_length": "9000",
        "dataset.enable_in_batch_packing": "true", "model.tensor_model_parallel_size": "2",
        "model.sequence_parallel": "true", "model.pipeline_model_parallel_size": "4",
        "model.pipeline_model_parallel_layout": "Et*6|t*8|t*8|t*7L",
        "model.expert_model_parallel_size": "2", "model.recompute_granularity": "full",
        "model.recompute_method": "block", "model.recompute_num_layers": "2",
    }  # fmt: skip


def test_even_stages_and_no_recomputation_are_null(tmp_path):
    found = given_to_it(chain(4, 4, recomputed=(0, 0)), tmp_path)
    assert {key for key, value in found.items() if value == "null"} == {
        "model.pipeline_model_parallel_layout", "model.recompute_granularity", "model.recompute_method",
        "model.recompute_num_layers",
    }  # fmt: skip
    assert given_to_it(chain(0, 4), tmp_path)["model.pipeline_model_parallel_layout"] == "E|t*4L"
    whole = given_to_it(chain(4, 4, recomputed=(4, 4)), tmp_path)
    assert (whole["model.recompute_method"], whole["model.recompute_num_layers"]) == ("uniform", "1")


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (chain(4, 4, vision=(2, 1)), "encoders are on the first"),
        (chain(4, 4, 0, 4), "only the first may have none"),
        (dataclasses.replace(chain(4, 4), global_batch_size=33), "33 is not 16 microbatches"),
    ],
)
def test_a_plan_without_keys_is_refused_with_the_reason(plan, why):
    with pytest.raises(ConfigError, match=why):
        emit_megatron_bridge(plan, CLUSTER)


@given(split_plans() | inline_plans())
def test_a_plan_has_problems_or_degrees_that_make_up_the_world(plan):
    if bridge_problems(plan, CLUSTER):
        with pytest.raises(ConfigError):
            emit_megatron_bridge(plan, CLUSTER)
        return
    script = emit_megatron_bridge(plan, CLUSTER)
    lines = (line.strip(" '\\") for line in script.splitlines() if line.startswith("    'model."))
    found = dict(line.split("=", 1) for line in lines)
    names = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    tp, pp, cp = (int(found[f"model.{name}_size"]) for name in names)
    assert plan.num_processes == tp * pp * cp * plan.module(LLM).parallel.dp
