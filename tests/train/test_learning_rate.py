"""Rates of whole stages beside transformers' own schedules, whose warm-up begins at zero where ours begins above it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from tests.train.rank import loop_settings

PEAK = 0.01


def rates(num_steps, **train):
    settings = loop_settings("run", num_steps, PEAK, **train)
    return [settings.learning_rate_of(step) for step in range(num_steps + 1)]


@given(st.integers(0, 20), st.integers(1, 200), st.sampled_from(["cosine", "linear", "wsd", "constant"]))
def test_rates_rise_to_their_peak_and_fall_to_the_floor(warmup_steps, num_steps, decay):
    train = {"warmup_steps": warmup_steps, "lr_decay": decay, "lr_floor_frac": 0.25}
    found = rates(num_steps, **train)
    later = dataclasses.replace(loop_settings("run", num_steps + 7, PEAK, **train), first_step=7)
    assert [later.learning_rate_of(step + 7) for step in range(num_steps + 1)] == found, "a later stage begins anew"
    rise, fall = found[:warmup_steps], found[warmup_steps:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(0 < rate <= PEAK * (1 + 1e-9) for rate in found)
    if num_steps > warmup_steps:
        assert fall[0] == pytest.approx(PEAK)
        assert fall[-1] == pytest.approx(PEAK if decay == "constant" else PEAK / 4)


@pytest.mark.parametrize(
    ("train", "theirs"),
    [
        ({"lr_floor_frac": 0.1}, ("cosine_with_min_lr", {"min_lr_rate": 0.1})),
        ({"lr_decay": "linear", "lr_floor_frac": 0}, ("linear", {})),
        ({"lr_decay": "constant"}, ("constant_with_warmup", {})),
        (
            {"lr_decay": "wsd", "lr_floor_frac": 0.2, "lr_decay_frac": 0.25},
            ("warmup_stable_decay", {"num_decay_steps": 10, "min_lr_ratio": 0.2, "decay_type": "linear"}),
        ),
    ],
)
def test_behind_the_warm_up_rates_are_those_of_transformers(train, theirs):
    num_steps, warmup_steps = 40, 5
    name, options = theirs
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = optimization.get_scheduler(name, adam, warmup_steps, num_steps, options)
    expected = []
    for _ in range(num_steps):
        expected += schedule.get_last_lr()
        adam.step()
        schedule.step()
    found = rates(num_steps, warmup_steps=warmup_steps, **train)
    assert found[warmup_steps:num_steps] == pytest.approx(expected[warmup_steps:], rel=1e-9)
