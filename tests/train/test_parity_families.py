"""Every way of calling a tower, in every kind of pipeline: gradients equal a plain Hugging Face run.

`test_parity.py` does this for Qwen2.5-Omni over many layouts and steps; here a few layouts tell whether what travels
between the ranks (sizes of items, wide rows with deep features, plain positions, hidden states of a cut tower) is right
for the other families.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from dflop.models.family import Family
from dflop.records import LLM, Plan
from tests.models.tiny_families import CASES
from tests.train.parity import Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan
from tests.train.tiny_subject import Tiny

LAYOUTS = (
    "encoder dp2 + llm pp2", "encoder + llm dp2", "encoder + llm dp2, recomputed", "inline pp2", "inline cp3",
)  # fmt: skip


def plan_of(family: Family, layout: str) -> Plan:
    (encoder,) = family.towers
    if layout.startswith("encoder dp2"):
        return make_plan({encoder: (1, 2), LLM: (2, 1)}, num_microbatches=2, of=family)
    if layout.startswith("encoder + llm dp2"):
        plan = make_plan({encoder: (1, 1), LLM: (1, 2)}, num_microbatches=2, of=family)
        modules = tuple(replace(m, recompute=layout.endswith("recomputed")) for m in plan.modules)
        return replace(plan, modules=modules)
    depth = {s.module: s.num_layers for s in family.specs()}
    entry = family.specs()[-1].num_entry_layers
    if layout == "inline cp3":
        return make_inline_plan([depth], dp=1, cp=3, num_microbatches=2)
    stages = [{encoder: depth[encoder], LLM: entry}, {LLM: depth[LLM] - entry}]
    return make_inline_plan(stages, dp=1, num_microbatches=2)


cached_reference = cache(reference)
QUICK = {
    ("Qwen3-VL", "encoder dp2 + llm pp2"), ("LLaVA-OneVision with Llama", "encoder + llm dp2, recomputed"),
    ("InternVL", "inline pp2"), ("Qwen2.5-VL", "inline pp2"), ("Qwen3-VL", "inline cp3"), ("InternVL", "inline cp3"),
    ("Qwen2-VL", "encoder + llm dp2"),
    ("Qwen2-Audio", "encoder + llm dp2"),
}  # fmt: skip
"""Not in a lane: every family, and every layout, at least once."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.lane("layouts"))
        for pair in itertools.product(CASES, LAYOUTS)
    ],
)
def test_gradients_equal_hugging_face(name, layout, tmp_path):
    subject = Tiny(name)
    plan = plan_of(subject.family, layout)
    plans = tuple(make_step_plan(plan, b, step, text_only_slot=False) for step, b in enumerate(subject.batches))
    assert_equal_steps(run_trial(Trial(subject, plan, plans), tmp_path), cached_reference(subject))
