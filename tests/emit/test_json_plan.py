import dataclasses
import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.emit.json_plan import emit_json
from dflop.records import LLM, ParallelSpec
from tests.emit.plans import CLUSTER, inline_plans, module, split, split_plans

STEPS = ("formula_step_s", "predicted_step_s", "baseline_step_s", "sync_s", "uniform_step_s")


def test_layers_run_again_above_their_limits():
    plain = module(LLM, 1, 3, 1, layers_per_stage=(3, 5, 4), recompute=True)
    assert [plain.num_rerun(stage, 9) for stage in range(3)] == [3, 5, 4]
    limited = dataclasses.replace(plain, recompute_tokens=((4, 4, 9), (), (7,)))
    tokens = np.array([4, 5, 9, 10])
    assert [np.broadcast_to(limited.num_rerun(s, tokens), 4).tolist() for s in range(3)] == [
        [0, 2, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1],
    ]  # fmt: skip
    plan = split(dataclasses.replace(limited, parallel=ParallelSpec(1, 3, 4, ep=2), parameter_shards=4))
    (llm,) = json.loads(emit_json(plan, CLUSTER))["modules"]
    assert (llm["recompute_tokens"], llm["ep"], llm["parameter_shards"]) == ([[4, 4, 9], [], [7]], 2, 4)


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=40)
@given(st.one_of(split_plans(), inline_plans()), st.lists(st.floats(allow_infinity=False), min_size=5))
def test_every_plan_is_standard_json(plan, steps):
    plan = dataclasses.replace(
        plan, plan_id="p", table_ids=("a", "b"), snapshot_seq=7, reason="né\n", **dict(zip(STEPS, steps, strict=False))
    )
    text = emit_json(plan, CLUSTER)
    json.loads(text, parse_constant=refuse)
    assert [m["module"] for m in json.loads(text)["modules"]] == [m.module for m in plan.modules]


def test_ranks_and_layers_are_written_out():
    plan = split(
        module("vision", 1, 1, 2), module(LLM, 2, 2, 2, layers_per_stage=(3, 5), max_tokens=99, recompute=True)
    )
    document = json.loads(emit_json(dataclasses.replace(plan, uniform_step_s=math.nan), CLUSTER))
    assert (document["schema"], document["version"], document["num_processes"]) == ("dflop.plan", 2, 10)
    llm = document["modules"][1]
    assert [s["ranks"] for s in llm["stages"]] == [[[2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert [(s["first_layer"], s["end_layer"]) for s in llm["stages"]] == [(0, 3), (3, 8)]
    assert (llm["max_tokens"], llm["recompute"], llm["zero1"]) == (99, True, False)
    assert document["modules"][0]["max_tokens"] is None
    assert document["simulated"]["predicted_step_s"] == 0.25
    assert document["simulated"]["uniform_step_s"] is None
