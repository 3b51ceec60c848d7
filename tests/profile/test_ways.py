from __future__ import annotations

import pytest
import torch

from dflop.errors import ConfigError
from dflop.models.build import build_model, cut_stage
from dflop.models.ways import TRAIN, WAYS, Way, apply_way, recompute_layers
from dflop.profile.groups import make_group
from dflop.records import LLM
from tests.profile.test_probe import MODULES, new_probe, probe, users
from tests.train.synthetic import HIDDEN_SIZE, family, hf_config

FROZEN, RECOMPUTE = WAYS["frozen"], WAYS["recompute"]


def measured(module, num_layers, way):
    return probe(module, num_layers, way).measure(make_group("random", users(module, 3), module))


def test_names_are_those_a_configuration_may_use():
    assert list(WAYS) == ["train", "frozen", "recompute"]
    assert Way(is_frozen=True, recompute=True).name == "frozen+recompute"


@pytest.mark.parametrize("module", MODULES)
def test_frozen_weights_take_no_gradients(module):
    m = measured(module, 1, FROZEN)
    assert (m.is_frozen, m.recompute, m.optimizer_s, m.forward_s > 0) == (True, False, 0.0, True)
    assert m.param_bytes == measured(module, 1, TRAIN).param_bytes
    if module == LLM:  # hands gradients on to the encoders
        assert m.backward_s > 0
        assert 0 < m.activation_bytes < measured(module, 1, TRAIN).activation_bytes
    else:
        assert (m.backward_s, m.backward_spread_s, m.activation_bytes) == (0.0, 0.0, 0)


@pytest.mark.parametrize("module", MODULES)
def test_a_recomputed_layer_keeps_its_input_only(module):
    one, two, three = (measured(module, n, RECOMPUTE) for n in (1, 2, 3))
    width = HIDDEN_SIZE if module == LLM else 32
    assert (one.recompute, one.is_frozen) == (True, False)
    assert two.activation_bytes - one.activation_bytes == 4 * width * one.num_tokens
    assert three.activation_bytes - two.activation_bytes == 4 * width * one.num_tokens
    assert one.activation_bytes < measured(module, 1, TRAIN).activation_bytes
    assert one.optimizer_s > 0


def stage_and_inputs(way):
    model = build_model(family(), hf_config(), seed=0, dtype=torch.float32)
    stage = cut_stage(model, family(), LLM, (1, 3))  # a middle stage
    apply_way(stage, way)
    hidden = torch.randn(20, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0), requires_grad=True)
    positions = torch.arange(20).expand(3, -1)
    stage(hidden, positions, torch.tensor([0, 12, 20], dtype=torch.int32)).square().sum().backward()
    return stage, hidden


def test_recomputation_changes_no_gradient():
    (plain, x), (again, y) = stage_and_inputs(TRAIN), stage_and_inputs(RECOMPUTE)
    assert recompute_layers(again) == 2
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    for name, parameter in plain.names.items():
        torch.testing.assert_close(parameter.grad, again.names[name].grad, rtol=1e-5, atol=1e-6)


def test_frozen_input_gradient_is_that_of_training():
    (_, x), (frozen, y) = stage_and_inputs(TRAIN), stage_and_inputs(FROZEN)
    assert torch.equal(x.grad, y.grad)
    assert all(p.grad is None for p in frozen.names.values())


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(ConfigError, match="can be recomputed"):
        apply_way(torch.nn.Linear(2, 2), RECOMPUTE)


def test_optimizer_is_timed_once_per_probe():
    fresh = new_probe("audio", 1)
    group = make_group("random", users("audio", 2), "audio")
    assert len({fresh.measure(group).optimizer_s for _ in range(3)}) == 1
