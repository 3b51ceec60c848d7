"""At which degrees ranks share a tower's layer, and what keeps a layer whole."""

import pytest
from torch import nn

from dflop.models.generic.classes import layers_of
from dflop.models.splits import degrees_of
from tests.models.generic.configs import MORE, PARTS
from tests.models.generic.small import Small


def tower_layer(kind):
    family = (subject := Small(kind)).family
    tower = family.towers["vision"]
    return layers_of(subject.build().get_submodule(tower.path), tower.layers)[0]


@pytest.mark.parametrize("kind", PARTS | MORE)
def test_towers_that_parity_tests_cut_in_two_are_offered_in_two_and_not_beyond_their_two_heads(kind):
    """One that only projects patches is not cut."""
    assert degrees_of(tower_layer(kind), (1, 2, 3, 4)) == ((1,) if kind == "gemma4_unified" else (1, 2))


def with_convolution(layer, attention):
    layer.conv = nn.Conv1d(4, 4, 3)


def with_a_table_per_head(layer, attention):
    attention.relative = nn.Parameter(layer.mlp.fc1.weight.detach()[:2])


def with_heads_by_another_name(layer, attention):
    attention.num_attention_heads = 2


def with_another_name(layer, attention):
    attention.dense = nn.Linear(4, 4)


def without_width_of_heads(layer, attention):
    del attention.head_dim


@pytest.mark.parametrize(
    "change",
    [
        with_convolution, with_a_table_per_head, with_heads_by_another_name, with_another_name, without_width_of_heads,
    ],
)  # fmt: skip
def test_what_follows_no_known_rule_keeps_a_layer_whole(change):
    layer = tower_layer("gemma3")
    change(layer, layer.self_attn)
    assert degrees_of(layer, (1, 2)) == (1,)
