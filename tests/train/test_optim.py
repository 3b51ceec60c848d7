"""AdamW's numbers against torch's own, and what float32 master copies are for; replicas: test_zero."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dflop.config.train_section import GroupConfig
from dflop.train.optim import Optimizer, OptimizerSettings

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
SETTINGS = OptimizerSettings(learning_rate=0.1, weight_decay=0.0)


def make_parameters(seed, dtype=torch.float32, shapes=((3, 4), (5,), ())):
    generator = torch.Generator().manual_seed(seed)
    return {f"p{n}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for n, shape in enumerate(shapes)}


def set_gradients(parameters, seed, *others):
    generator = torch.Generator().manual_seed(seed)
    for name, p in parameters.items():
        gradient = torch.randn(p.shape, generator=generator)
        for target in (p, *(other[name] for other in others)):
            target.grad_dtype = torch.float32
            target.grad = gradient.clone()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rates=st.lists(st.floats(1e-5, 1e-1), min_size=1, max_size=5),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.999)),
)
def test_float32_gets_exactly_the_numbers_of_torch(seed, rates, decay, betas):
    ours = make_parameters(seed)
    theirs = copy.deepcopy(ours)
    optimizer = Optimizer(ours, OptimizerSettings(rates[0], decay, betas))
    reference = torch.optim.AdamW(theirs.values(), betas=betas, weight_decay=decay)
    for step, rate in enumerate(rates):
        set_gradients(ours, 100 * seed + step, theirs)
        optimizer.step(rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
    for name, p in ours.items():
        assert torch.equal(p, theirs[name])
        assert all(torch.equal(optimizer.state()[name][key], reference.state[theirs[name]][key]) for key in MOMENTS)
        assert "master" not in optimizer.state()[name]


def test_matrices_get_muons_numbers_and_all_else_adamws():
    names = ["model.embed_tokens.weight", "layers.0.q_proj.weight", "layers.0.norm.weight", "lm_head.weight"]
    shapes = ((7, 4), (6, 4), (4,), (7, 4))
    ours = dict(zip(names, make_parameters(1, shapes=shapes).values(), strict=True))
    theirs = copy.deepcopy(ours)
    rules = (GroupConfig(targets=("*.q_proj.weight",), lr_scale=0.5, weight_decay=0.3),)
    settings = dataclasses.replace(SETTINGS, weight_decay=0.1, rules=rules, optimizer="muon")
    optimizer = Optimizer(ours, settings)
    matrix = names[1]
    others = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1} for n, p in theirs.items() if n != matrix], betas=SETTINGS.betas
    )
    muon = torch.optim.Muon([theirs[matrix]], weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        set_gradients(ours, step, theirs)
        optimizer.step(0.02)
        for reference, rate in ((others, 0.02), (muon, 0.01)):
            for group in reference.param_groups:
                group["lr"] = rate
            reference.step()
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
    assert {name: set(kept) for name, kept in optimizer.state().items()} == {
        name: {"momentum_buffer"} if name == matrix else set(MOMENTS) for name in names
    }
    again = Optimizer(ours, settings)
    again.load_state(copy.deepcopy(optimizer.state()))
    assert torch.equal(again.state()[matrix]["momentum_buffer"], muon.state[theirs[matrix]]["momentum_buffer"])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), num_steps=st.integers(1, 5))
def test_bfloat16_is_the_rounded_value_of_what_float32_would_be(seed, num_steps):
    rounded = make_parameters(seed, torch.bfloat16)
    exact = {name: nn.Parameter(p.detach().float()) for name, p in rounded.items()}
    optimizer, reference = Optimizer(rounded, SETTINGS), Optimizer(exact, SETTINGS)
    for step in range(num_steps):
        set_gradients(rounded, 100 * seed + step, exact)
        optimizer.step(1e-2)
        reference.step(1e-2)
    for name, p in rounded.items():
        assert torch.equal(optimizer.state()[name]["master"], exact[name])
        assert torch.equal(p, exact[name].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(dtype):
    straight = make_parameters(1, dtype)
    optimizer = Optimizer(straight, SETTINGS)
    for step in range(2):
        set_gradients(straight, step)
        optimizer.step(1e-2)
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    again = Optimizer(resumed, SETTINGS)
    assert {n: set(s) for n, s in again.state().items()} == {n: set(s) for n, s in optimizer.state().items()}
    again.load_state(copy.deepcopy(optimizer.state()))
    set_gradients(straight, 7, resumed)
    for each in (optimizer, again):
        each.step(1e-2)
    assert all(torch.equal(p, resumed[name]) for name, p in straight.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_follows_the_float32_weights(dtype):
    parameters = make_parameters(1, dtype)
    expected = {name: p.detach().float().clone() for name, p in parameters.items()}
    optimizer = Optimizer(parameters, dataclasses.replace(SETTINGS, ema_decay=0.75))
    for step in range(3):
        set_gradients(parameters, step)
        optimizer.step(1e-2)
        for name, kept in optimizer.state().items():
            weight = kept.get("master", parameters[name].detach())
            expected[name] = 0.75 * expected[name] + 0.25 * weight
            torch.testing.assert_close(kept["ema"], expected[name])
    again = Optimizer(parameters, dataclasses.replace(SETTINGS, ema_decay=0.75))
    again.load_state(optimizer.state())
    assert all(torch.equal(kept["ema"], again.state()[name]["ema"]) for name, kept in optimizer.state().items())
    again.load_state({})
    assert all(torch.equal(kept["ema"], parameters[name].float()) for name, kept in again.state().items())


def test_what_a_state_lacks_begins_anew():
    parameters = make_parameters(1, torch.bfloat16)
    optimizer, empty = Optimizer(parameters, SETTINGS), Optimizer({}, SETTINGS)
    empty.step(1e-2)
    assert empty.state() == {}
    set_gradients(parameters, 0)
    optimizer.step(1e-2)
    kept = copy.deepcopy(optimizer.state()["p0"])
    del kept["master"]  # as written by a run in float32
    with torch.no_grad():
        parameters["p0"].fill_(3.0)
    optimizer.load_state({"p0": kept, "of another rank": kept})
    state = optimizer.state()
    assert torch.equal(state["p0"]["master"], torch.full((3, 4), 3.0))
    assert torch.equal(state["p0"]["exp_avg"], kept["exp_avg"])
    assert not any(state["p1"][key].any() for key in MOMENTS)
    assert torch.equal(state["p1"]["master"], parameters["p1"].float())
