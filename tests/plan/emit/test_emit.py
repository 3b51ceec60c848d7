from __future__ import annotations

import pytest

from dflop.errors import ConfigError
from dflop.plan.emit import EMITTERS, RULES, emitter
from dflop.plan.emit.json_plan import read_plan
from dflop.records import LLM
from tests.plan.emit.plans import CLUSTER, module, split

PLAN = split(module("vision", 1, 1, 2), module(LLM, 1, 2, 2))


@pytest.mark.parametrize("target", EMITTERS)
def test_every_target_takes_a_plan_and_its_cluster(target):
    text = emitter(target)(PLAN, CLUSTER)
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert target != "json" or read_plan(text) == PLAN


def test_an_unknown_target_names_the_valid_ones():
    with pytest.raises(ConfigError, match="cannot emit `megatron`") as caught:
        emitter("megatron")
    assert caught.value.hint == "did you mean `megatron-mimo`? valid: json, megatron-mimo, torchrun"


def test_targets_with_rules_are_targets():
    assert set(RULES) <= set(EMITTERS)
