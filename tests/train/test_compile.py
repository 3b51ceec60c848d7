"""Compiled decoder layers train what eager ones do, whatever stands around them.

The fast tests trace and differentiate as torch's compiler does, and run the graphs without code of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dflop.parallel.compiled import INDUCTOR
from dflop.profile.saved import saved_bytes
from dflop.records import LLM
from tests.train.layouts import ONE, Layout
from tests.train.layouts_context import HEART
from tests.train.parity import assert_equal_steps, run_trial
from tests.train.rank import Rank
from tests.train.synthetic import ALL
from tests.train.test_parity import cached_reference

WITHOUT_CODE = "aot_eager"
FAST = "dp2, sharded, half recomputed, half on the host"
LAYOUTS = {
    "one": Layout(ONE),
    "tp2": Layout(({"vision": 2, LLM: 4},), tp=2),
    FAST: Layout(ONE, dp=2, sharded=ALL, recompute=(LLM,), half=True, offloaded=True),
    "cp3": Layout(ONE, cp=3),
    "tp2 cp2, recomputed": HEART["tp2 cp2, recomputed"],
}


def assert_parity(name, compiler, folder):
    layout = LAYOUTS[name]
    found = run_trial(replace(layout.trial, compiler=compiler), folder)
    assert_equal_steps(found, cached_reference(layout.subject))


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
