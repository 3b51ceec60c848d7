import dataclasses

import pytest
from hypothesis import given, settings

from dflop.emit import mimo_rules
from dflop.emit.megatron_mimo import emit_megatron_mimo, render
from dflop.errors import ConfigError
from dflop.records import LLM, Plan
from tests.builders import make_inline_plan
from tests.emit.mimo_text import layers_of, parsed, problems_of, recompute_of
from tests.emit.plans import CLUSTER, mimo_like_plans, module, split, split_plans

ROOMY = dataclasses.replace(CLUSTER, num_nodes=1000)


def text_problems(text: str, plan: Plan) -> list[str]:
    return problems_of(text, world_size=plan.num_processes, num_llm_layers=sum(plan.module(LLM).layers_per_stage))


@settings(max_examples=50)
@given(mimo_like_plans())
def test_an_accepted_plan_breaks_no_rule_in_the_text_and_says_what_the_plan_says(plan):
    if mimo_rules.mimo_problems(plan, ROOMY.num_processes):
        with pytest.raises(ConfigError, match="not valid for Megatron's MIMO"):
            emit_megatron_mimo(plan, ROOMY)
        return
    text = emit_megatron_mimo(plan, ROOMY)
    assert text_problems(text, plan) == []
    document, llm = parsed(text), plan.module(LLM)
    assert layers_of(document, sum(llm.layers_per_stage)) == llm.layers_per_stage
    assert {m.recompute for m in plan.modules} == {recompute_of(document)}
    assert document["train"]["global_batch_size"] == plan.global_batch_size
    assert document["train"]["global_batch_size"] // document["train"]["micro_batch_size"] == plan.num_microbatches
    names = {"vision": "images", "audio": "audios", LLM: "language"}
    found = document["model"]["megatron_mimo_parallelism_config"]["module_parallelisms"]
    for m in plan.modules:
        entry, p = found.pop(names.get(m.module, m.module)), m.parallel
        degrees = [entry[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "data")]
        assert [*degrees, entry["rank_offset"]] == [p.tp, p.pp, p.dp, m.first_rank]
    assert found == {}


@settings(max_examples=50)
@given(split_plans())
def test_what_the_rules_refuse_is_wrong_in_the_text_too(plan):
    alike = dataclasses.replace(plan, modules=tuple(dataclasses.replace(m, recompute=False) for m in plan.modules))
    size, rest = divmod(alike.global_batch_size, alike.num_microbatches)
    if rest:  # what the file says is then another batch, not a broken rule
        alike = dataclasses.replace(alike, global_batch_size=size * alike.num_microbatches)
    found = mimo_rules.mimo_problems(alike, ROOMY.num_processes)
    broken = text_problems(render(alike), alike)
    told = {
        "tp": "not a power of two",
        "dp": "neither divides",
        "encoder pp": "encoders have one",
        "microbatches": "even",
    }
    for rule, words in told.items():
        assert (rule in broken) == any(words in problem for problem in found)
    assert {"types", "language", "cp", "dense", "ranks", "recompute", "zero1"}.isdisjoint(broken)
    if any("only first and last" in problem and f"`{LLM}`" in problem for problem in found):
        layers = layers_of(parsed(render(alike)), sum(alike.module(LLM).layers_per_stage))
        assert layers != alike.module(LLM).layers_per_stage


def test_one_module_that_shards_its_optimizer_shards_all_and_the_file_says_so():
    plan = split(module("vision", 1, 1, 4), module(LLM, 2, 2, 2, shard_optimizer=True))
    text = emit_megatron_mimo(plan, CLUSTER)
    assert parsed(text)["ddp"] == parsed(text)["optimizer"] == {"use_distributed_optimizer": True}
    assert "does not use it for: images" in text
    alone = split(module("vision", 1, 1, 1), module(LLM, 2, 2, 2, shard_optimizer=True))
    assert "does not use it" not in emit_megatron_mimo(alone, CLUSTER)
    nothing_to_share = split(module("vision", 1, 1, 4), module(LLM, 2, 2, 1, shard_optimizer=True))
    assert parsed(emit_megatron_mimo(nothing_to_share, CLUSTER))["ddp"] == {"use_distributed_optimizer": False}


def test_shared_parameters_are_refused():
    plan = split(module("vision", 1, 1, 4), module(LLM, 1, 1, 4, shard_optimizer=True, parameter_shards=4))
    with pytest.raises(ConfigError, match=r"`llm` shards parameters \(FSDP2\)"):
        emit_megatron_mimo(plan, CLUSTER)


def test_an_inline_plan_is_refused():
    with pytest.raises(ConfigError, match=r"the plan colocates vision\+llm; "):
        emit_megatron_mimo(make_inline_plan(2), CLUSTER)
