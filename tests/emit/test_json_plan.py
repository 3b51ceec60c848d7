import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.emit.json_plan import emit_json, read_plan
from dflop.errors import ConfigError
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
    assert read_plan(emit_json(plan, CLUSTER)).modules == plan.modules


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=40)
@given(st.one_of(split_plans(), inline_plans()), st.lists(st.floats(allow_infinity=False), min_size=5))
def test_the_reader_gives_the_same_plan_back(plan, steps):
    plan = dataclasses.replace(
        plan, plan_id="p", table_ids=("a", "b"), snapshot_seq=7, reason="né\n", **dict(zip(STEPS, steps, strict=False))
    )
    text = emit_json(plan, CLUSTER)
    json.loads(text, parse_constant=refuse)
    # NaN is not equal to itself; repr is.
    assert repr(read_plan(text)) == repr(plan)


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


def changed(path: tuple[str | int, ...], value: object) -> str:
    """The document of a plan with one value replaced; None drops the key."""
    document = json.loads(emit_json(split(module("vision", 1, 1, 2), module(LLM, 2, 2, 2)), CLUSTER))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is None:
        del inner[path[-1]]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"), (changed(("version",), 3), "version 3"), (changed(("modules", 1, "dp"), None), "'dp'"),
        (changed(("modules", 1, "tp"), 4), "stages have not dp x cp x tp = "),
        (changed(("modules", 1, "first_rank"), 3), "stage 0 disagrees"),
        (changed(("modules", 1, "stages", 1, "end_layer"), "x"), "invalid literal"),
        (changed(("num_processes",), 11), "num_processes is 11, the modules have 10"),
        (changed(("simulated", "sync_s"), math.inf), "inf is not a time in seconds"),
    ],
)  # fmt: skip
def test_what_is_not_a_plan_is_refused(text, what):
    with pytest.raises(ConfigError, match=what):
        read_plan(text)


def test_documents_of_the_first_version_are_read():
    assert read_plan(changed(("version",), 1)) == read_plan(changed(("layout",), "split"))


def test_unknown_keys_are_ignored():
    assert read_plan(changed(("note",), "hello")) == read_plan(changed(("modules", 0, "note"), "hello"))
