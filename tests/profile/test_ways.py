from __future__ import annotations

import pytest
import torch

from dflop.errors import ConfigError
from dflop.models.ways import TRAIN, WAYS, apply_way, draws
from dflop.profile.groups import make_group
from dflop.records import LLM
from tests.profile.measuring import measure
from tests.profile.test_probe import MODULES, probe, users
from tests.train.synthetic import HIDDEN_SIZE

FROZEN, RECOMPUTE = WAYS["frozen"], WAYS["recompute"]


def measured(module, num_layers, way):
    return measure(probe(module, num_layers, way), make_group("random", users(module, 3), module))


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


def test_forward_passes_may_differ_in_how_many_layers_run_again():
    group = make_group("random", users(LLM, 3), LLM)

    def kept(num_rerun: int) -> int:
        of = probe(LLM, 3, RECOMPUTE)
        of._stage.reruns.num_layers = num_rerun
        return measure(of, group).activation_bytes

    plain, inputs = measured(LLM, 3, TRAIN).activation_bytes, measured(LLM, 3, RECOMPUTE).activation_bytes
    found = [kept(n) for n in range(4)]
    assert (found[0], found[3]) == (plain, inputs)
    assert found == pytest.approx([plain - n * (plain - inputs) / 3 for n in range(4)], rel=0.05)


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(ConfigError, match="can be recomputed"):
        apply_way(torch.nn.Linear(2, 2), RECOMPUTE)


@pytest.mark.parametrize(("p", "kept"), [(0.0, False), (0.5, True)])
def test_random_numbers_are_kept_for_the_second_pass_only_where_a_layer_draws_some(p, kept):
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(p))
    assert draws(layer) is kept
    layer[1], layer.attention_dropout = torch.nn.Identity(), p
    assert draws(layer) is kept
