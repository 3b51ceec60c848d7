"""Plans that somebody wrote or changed by hand: refused with everything that is wrong, before a rank builds a model."""

from __future__ import annotations

import dataclasses

import pytest

from dflop.errors import ConfigError
from dflop.plan.runnable import check_plan
from dflop.records import LLM, ParallelSpec, Plan
from tests.builders import make_inline_plan, make_plan, make_specs

SPECS = tuple(dataclasses.replace(s, max_pp=3, tp_choices=(1, 2)) for s in make_specs("vision"))
WITH_AUDIO = tuple(dataclasses.replace(s, max_pp=3, tp_choices=(1, 2)) for s in make_specs("vision", "audio"))
"""Modules of four layers."""
ENTRY = (SPECS[0], dataclasses.replace(SPECS[1], num_entry_layers=2))


def changed(plan: Plan, name: str, **fields: object) -> Plan:
    modules = (dataclasses.replace(m, **fields) if m.module == name else m for m in plan.modules)
    return dataclasses.replace(plan, modules=tuple(modules))


SPLIT, INLINE = make_plan({"vision": 2, LLM: 2}, llm_pp=2), make_inline_plan(2, pp=2)
MIXED = changed(changed(INLINE, "vision", layers_per_stage=(3, 1)), LLM, layers_per_stage=(0, 4))
LATE = make_inline_plan(2, pp=2, modules=("vision", "audio", LLM))
LATE = changed(changed(LATE, "vision", layers_per_stage=(4, 0)), LLM, layers_per_stage=(0, 4))
LATE = changed(LATE, "audio", layers_per_stage=(2, 2))
WRONG = {
    "tp": (changed(SPLIT, LLM, parallel=ParallelSpec(4, 2, 2)), r"`llm` cannot be split over 4 .* only over \[1, 2\]"),
    "layers": (changed(SPLIT, LLM, layers_per_stage=(2, 3)), r"`llm` has 4 layers for 2 stages, .* \[2, 3\]"),
    "stages": (changed(SPLIT, LLM, layers_per_stage=(4,)), r"`llm` has 4 layers for 2 stages, .* \[4\]"),
    "deep": (make_plan({"vision": 1, LLM: 1}, encoder_pp=4), r"`vision` can be cut into 3 stages at most; .*"),
    "empty": (changed(SPLIT, LLM, layers_per_stage=(0, 4)), "a stage of `llm` holds no layer"),
    "overlap": (changed(SPLIT, LLM, first_rank=1), "ranks of the modules overlap"),
    "unknown": (make_plan({"audio": 1, LLM: 1}), "the model has no module `audio`"),
    "no llm": (make_plan({"vision": 1}), "modules are vision: .* `llm` is the last"),
    "grids": (
        changed(INLINE, "vision", parallel=ParallelSpec(1, 2, 1)),
        r"`vision`, `llm` share ranks .* differ in their degrees",
    ),
    "backwards": (changed(MIXED, LLM, layers_per_stage=(4, 0)), r"`vision` ends .* after .* `llm` begins"),
    "idle": (changed(INLINE, LLM, layers_per_stage=(4, 0)), "a stage of `llm` holds no layer"),
    "apart": (changed(LATE, "audio", first_rank=4), "`llm` begins on stage 1, but rows of other ranks go to the first"),
    "encoders": (
        changed(make_plan({"vision": 2, "audio": 2, LLM: 2}), "audio", first_rank=0),
        "share ranks without `llm`",
    ),
    "limits of an encoder": (changed(INLINE, "vision", recompute=True, recompute_tokens=((5,), ())), "`llm` alone may"),
    "two ways": (
        changed(INLINE, LLM, recompute=True, recomputed=(0, 1), recompute_tokens=((), (5,))),
        "no `recomputed`",
    ),
    "too many limits": (
        changed(SPLIT, LLM, recompute=True, recompute_tokens=((), (1, 2)), offloaded=(0, 1)),
        r"at most \[2, 1\] layers",
    ),
    "unordered limits": (changed(SPLIT, LLM, recompute=True, recompute_tokens=((2, 1), ())), r"must ascend"),
    "limits of one stage": (changed(SPLIT, LLM, recompute=True, recompute_tokens=((1, 2),)), r"they are \(\(1, 2\),\)"),
}


def test_experts_are_shared_as_the_engine_can():
    kind = dataclasses.replace(SPECS[1].kinds[0], num_experts=6, num_active_experts=2, num_expert_params=60)
    specs = (SPECS[0], dataclasses.replace(SPECS[1], layers=((kind, 4),)))
    plan = changed(make_inline_plan(4), "vision", parallel=ParallelSpec(1, 1, 4, ep=2), parameter_shards=4)
    llm = plan.module(LLM)
    for ep, shards, message in (
        (2, 4, ""), (2, 2, ""), (2, 1, ""), (2, 3, "divide its 4 replicas and the 3 that share out"),
        (4, 4, r"`llm` cannot share its experts over ep 4 ranks, only over \[1, 2\]"),
    ):  # fmt: skip
        degrees = dataclasses.replace(llm.parallel, ep=ep)
        of = {"parallel": degrees, "parameter_shards": shards}
        shared = changed(changed(plan, "vision", **of), LLM, **of)
        if not message:
            check_plan(shared, specs)
            continue
        with pytest.raises(ConfigError, match=message):
            check_plan(shared, specs)


LIMITED = changed(SPLIT, LLM, recompute=True, recompute_tokens=((3, 3), (2,)), offloaded=(0, 1))


@pytest.mark.parametrize("plan", [SPLIT, INLINE, MIXED, LIMITED, make_inline_plan(1), make_plan({LLM: 3}, llm_pp=3)])
def test_what_the_engine_can_run_passes(plan):
    check_plan(plan, SPECS)


@pytest.mark.parametrize("name", WRONG)
def test_what_it_cannot_run_is_named(name):
    plan, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        check_plan(plan, WITH_AUDIO if name in ("apart", "encoders") else SPECS)
    assert caught.value.where == "plan plan"


def test_first_layers_that_belong_together_are_not_parted():
    early = changed(SPLIT, LLM, layers_per_stage=(1, 3))
    check_plan(early, SPECS)
    with pytest.raises(ConfigError, match="the first with 2 layers; the plan has"):
        check_plan(early, ENTRY)
    check_plan(SPLIT, ENTRY)


def test_an_encoder_that_is_cut_is_named():
    specs = (dataclasses.replace(SPECS[0], max_pp=1), SPECS[1])
    with pytest.raises(ConfigError, match=r"`vision` must stay on one stage; the plan has \[3, 1\]"):
        check_plan(MIXED, specs)


def test_everything_that_is_wrong_is_said_at_once():
    plan = changed(changed(SPLIT, LLM, layers_per_stage=(1, 1)), "vision", parallel=ParallelSpec(8, 1, 2))
    with pytest.raises(ConfigError, match=r"`vision` cannot be split.*; `llm` has 4 layers"):
        check_plan(plan, SPECS)
