"""Compiled layers of encoders and LLM train what eager ones do, whatever stands around them.

The fast tests trace and differentiate as torch's compiler does, and run the graphs without code of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dflop.models.build import EncoderStage
from dflop.parallel.compiled import INDUCTOR
from dflop.parallel.stages import Piece, build_stages
from dflop.profile.saved import saved_bytes
from dflop.records import LLM
from tests.models.generic.small import Small
from tests.train import test_parity_families, test_parity_generic
from tests.train.layouts import ONE, Layout
from tests.train.layouts_context import HEART
from tests.train.parity import Trial, assert_equal_steps, run_trial
from tests.train.rank import Rank
from tests.train.synthetic import ALL, make_step_plan
from tests.train.test_parity import cached_reference
from tests.train.tiny_subject import Tiny

WITHOUT_CODE = "aot_eager"
FAST = "dp2, sharded, half recomputed, half on the host"
LAYOUTS = {
    "one": Layout(ONE),
    "tp2": Layout(({"vision": 2, LLM: 4},), tp=2),
    FAST: Layout(({"vision": 2, LLM: 4},), dp=2, sharded=ALL, recompute=("vision", LLM), half=True, offloaded=True),
    "cp3": Layout(ONE, cp=3),
    "towers frozen": Layout(ONE, frozen=("vision.tower", "audio.tower")),
    "tp2 cp2, recomputed": HEART["tp2 cp2, recomputed"],
}


def assert_parity(name, compiler, folder):
    layout = LAYOUTS[name]
    found = run_trial(replace(layout.trial, compiler=compiler), folder)
    assert_equal_steps(found, cached_reference(layout.subject, frozen=layout.frozen))


@pytest.mark.budget(150, "every rank traces a layer in each of its forms")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == FAST else pytest.mark.lane("layouts")) for name in LAYOUTS]
)
def test_gradients_of_compiled_layers_equal_hugging_face(name, tmp_path):
    assert_parity(name, WITHOUT_CODE, tmp_path)


@pytest.mark.lane("layouts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_layers_by_inductor_equal_hugging_face(name, tmp_path):
    assert_parity(name, INDUCTOR, tmp_path)


TOWERS = {
    "Qwen3-VL": "inline cp3", "Qwen2.5-VL": "inline pp2", "InternVL with InternViT-6B": "encoder + llm dp2",
    "LLaVA-OneVision with Llama": "encoder + llm dp2, recomputed", "Qwen2-Audio": "encoder dp2 + llm pp2",
}  # fmt: skip
"""Families, each in a layout of `test_parity_families.py`."""
GENERIC = {"gemma3": "one", "smolvlm": "tp2", "mistral3": "pp2, recomputed"}


@pytest.mark.lane("layouts")
@pytest.mark.parametrize("name", TOWERS | GENERIC)
def test_gradients_of_other_towers_equal_hugging_face(name, tmp_path):
    if name in TOWERS:
        subject: Any = Tiny(name)
        plan = test_parity_families.plan_of(subject.family, TOWERS[name])
    else:
        subject = Small(name)
        plan = test_parity_generic.plan_of(subject, GENERIC[name])
    plans = tuple(make_step_plan(plan, b, step, text_only_slot=False) for step, b in enumerate(subject.batches))
    trial = Trial(subject, plan, plans, compiler=WITHOUT_CODE)
    assert_equal_steps(run_trial(trial, tmp_path), cached_reference(subject))


SIZES: dict[str, list[list[tuple[int, ...]]]] = {
    "vision": [[(1, 4, 8)], [(2, 4, 12), (1, 10, 12)], [(1, 12, 16)], [(1, 6, 10), (4, 4, 8), (1, 4, 4)]],
    "audio": [[(30,)], [(50,), (33,)], [(100,)], [(60,), (200,), (10,), (41,)]],
}


@pytest.mark.budget(60, "a layer is traced")
@pytest.mark.parametrize("module", SIZES)
def test_no_number_of_items_and_tokens_compiles_an_encoder_anew(module):
    """After the first two microbatches, which tell what is always the same."""
    subject, made = LAYOUTS["one"].subject, list[int]()
    torch._dynamo.reset()
    counters.clear()
    piece = Piece(module, (0, 2), compiler=WITHOUT_CODE)
    (stage,), _ = build_stages(subject.build(), subject.family, [piece], torch.device("cpu"), kernel="sdpa")
    assert isinstance(stage, EncoderStage)
    for sizes in SIZES[module]:
        num_values = torch.tensor(sizes).prod(1).sum()
        data = torch.randn(128, num_values) if module == "audio" else torch.randn(num_values, 3 * 2 * 14 * 14)
        stage(data, torch.tensor(sizes)).sum().backward()
        made.append(counters["stats"]["unique_graphs"])
    assert 0 < made[1] == made[-1]


@pytest.mark.budget(60, "a layer is traced")
def test_compiled_layers_run_again(one_rank):
    """And hold nothing until they do."""
    subject, kept = replace(LAYOUTS["one"].subject, num_steps=1), {}
    for recompute in ((), (LLM,)):
        plan = Layout(ONE, recompute=recompute).plan
        stage = Rank(0, plan, subject.family, subject.build(), compiler=WITHOUT_CODE).stage_of[LLM]
        hidden, bounds = torch.randn(8, stage.row_width, requires_grad=True), torch.tensor([0, 8], dtype=torch.int32)
        positions = torch.arange(8).expand(3, -1)
        kept[recompute], _ = saved_bytes(partial(stage, hidden, positions, bounds), stage.names.values())
    assert kept[(LLM,)] < kept[()] / 4
