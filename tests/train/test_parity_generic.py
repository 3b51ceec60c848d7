"""Models without a family of their own, in every kind of pipeline: gradients equal a plain transformers run.

Layers of linear attention, of experts and with windows, images whose tokens see each other, deep features, towers that
take grids, sizes and tiles. Batches are packed and uneven; the second step has other weights.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache

import pytest

from dflop.records import LLM, Plan
from tests.models.generic.configs import MORE, PARTS
from tests.models.generic.small import Small
from tests.train.parity import TOLERANCE, Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import ALL, limited, make_inline_plan, make_plan, make_step_plan, sharing

LAYOUTS = (
    "one", "vision + llm pp2", "pp2, recomputed", "dp2", "dp2, sharded, recomputed", "tp2", "cp2",
    "tp2 cp2", "vision tp2 + llm dp2, sharded",
)  # fmt: skip
EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
SHARE_EXPERTS = (
    "dp2 ep2, sharded", "dp4 ep2, sharded, recomputed", "dp4 ep2, sharded in twos, limited", "dp4 ep4, sharded",
    "pp2 dp2 ep2, sharded, recomputed", "cp2 ep2, sharded", "dp2 ep2", "dp4 ep2, limited", "pp2 dp2 ep2, recomputed",
    "cp2 ep2",
)  # fmt: skip
CARRY_STATE = ("qwen3_5", "qwen3_5_moe")
SHARE_STATES = ("cp3, recomputed", "pp2 cp2, sharded")
"""Three ranks do not divide the heads."""
ONE_LAYER = ("gemma4_unified",)
"""Their tower projects patches: no rule cuts it."""
ROUNDING = 3e-5
"""Of those that amplify rounding: by the delta rule, or by scores that are not scaled."""
IMAGE_BLOCKS = ("gemma3", "gemma4_unified")
CONVOLUTIONS = ("lfm2_vl",)
REFUSED = {(kind, "tp2") for kind in (*CARRY_STATE, *CONVOLUTIONS, *ONE_LAYER)} | {
    (kind, "cp2") for kind in IMAGE_BLOCKS
}
REFUSED |= {(kind, "tp2 cp2") for kind, _ in REFUSED} | {(kind, "vision tp2 + llm dp2, sharded") for kind in ONE_LAYER}


def plan_of(subject: Small, layout: str) -> Plan:
    specs = {spec.module: spec for spec in subject.family.specs()}
    depth = {name: spec.num_layers for name, spec in specs.items()}
    if layout == "vision + llm pp2":
        return make_plan({"vision": (1, 1), LLM: (2, 1)}, num_microbatches=2, of=subject.family)
    if layout == "vision tp2 + llm dp2, sharded":
        return sharing(make_plan({"vision": (1, 1, 2), LLM: (1, 2)}, num_microbatches=2, of=subject.family), ALL)
    first = max(specs[LLM].num_entry_layers, depth[LLM] // 2)
    halves = [{"vision": depth["vision"], LLM: first}, {LLM: depth[LLM] - first}]
    degrees = {key: int(n) for key, n in re.findall(r"(dp|tp|cp|ep)(\d)", layout)}
    plan = make_inline_plan(halves if "pp2" in layout else [depth], num_microbatches=2, **{"dp": 1} | degrees)
    plan = sharing(plan, 2 if "in twos" in layout else ALL if "sharded" in layout else 0)
    modules = (limited(m) if "limited" in layout else m for m in plan.modules)
    return replace(plan, modules=tuple(replace(m, recompute=m.recompute or "recomputed" in layout) for m in modules))


cached_reference = cache(reference)
QUICK = {
    ("qwen3_5", "pp2, recomputed"), ("qwen3_5", "vision + llm pp2"), ("qwen3_5_moe", "dp2, sharded, recomputed"),
    ("qwen3_vl_moe", "vision + llm pp2"), ("qwen3_vl_moe", "dp2, sharded, recomputed"), ("gemma3", "pp2, recomputed"),
    ("qwen3_5_moe", "dp4 ep2, sharded in twos, limited"), ("qwen3_vl_moe", "dp2 ep2, sharded"),
    ("qwen3_vl_moe", "pp2 dp2 ep2, recomputed"),
    ("glm4v_moe", "pp2 dp2 ep2, sharded, recomputed"), ("glm4v_moe", "dp2"), ("glm4v_moe", "tp2"), ("internvl", "cp2"),
    ("smolvlm", "tp2"), ("mistral3", "one"),
    ("qwen3_5_moe", "vision tp2 + llm dp2, sharded"), ("qwen3_vl_moe", "tp2 cp2"),
    ("qwen3_5", "cp3, recomputed"), ("lfm2_vl", "pp2 cp2, sharded"),
    ("lfm2_vl", "vision + llm pp2"), ("lfm2_vl", "dp2, sharded, recomputed"),
    ("gemma4_unified", "dp2, sharded, recomputed"), ("gemma4_unified", "vision + llm pp2"),
}  # fmt: skip
"""Not in a lane: every type, and every layout, at least once."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.lane("layouts"))
        for pair in itertools.chain(
            itertools.product(PARTS | MORE, LAYOUTS),
            itertools.product(EXPERTS, SHARE_EXPERTS),
            itertools.product((*CARRY_STATE, *CONVOLUTIONS), SHARE_STATES),
        )
        if pair not in REFUSED
    ],
)
def test_gradients_equal_transformers(kind, layout, tmp_path):
    subject = Small(kind)
    plan = plan_of(subject, layout)
    plans = tuple(make_step_plan(plan, b, step, text_only_slot=False) for step, b in enumerate(subject.batches))
    tolerance = ROUNDING if kind in (*CARRY_STATE, *ONE_LAYER) else TOLERANCE
    assert_equal_steps(run_trial(Trial(subject, plan, plans), tmp_path), cached_reference(subject), tolerance)
