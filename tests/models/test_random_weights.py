"""Weights drawn unit by unit: as Hugging Face draws them, whoever draws which of them, and never all at once."""

from __future__ import annotations

import pytest
import torch

from dflop.models.random_weights import RandomWeights
from dflop.models.weights import build_empty, construct
from tests.models.tiny_families import CASES
from tests.models.whole_model import build_model
from tests.train import synthetic
from tests.train.synthetic import family, tiny_model


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_unit_has_the_distribution_of_hugging_face_and_no_unit_repeats_another(case):
    theirs = construct(case.family, case.full_config, torch.float32)
    ours = build_model(case.family, case.full_config, seed=0, dtype=torch.float32)
    drawn = {}
    for (name, p), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if want.unique().numel() <= 2:  # zeros or ones
            assert torch.equal(p, want), name
            continue
        assert float(p.std()) == pytest.approx(float(want.std()), rel=6 / want.numel() ** 0.5), name
        drawn.setdefault(tuple(p.flatten()[:8].tolist()), []).append(name)
    assert len(drawn) > 10
    assert all(len(names) == 1 for names in drawn.values()), drawn


def test_parts_read_in_any_order_are_those_of_the_whole_model_and_the_model_stays_without_memory():
    whole = dict(tiny_model().named_parameters())
    empty = build_empty(family(), synthetic.hf_config(), torch.float32)
    weights = RandomWeights(empty, 0)
    for name, p in reversed(whole.items()):
        half = len(p) // 2
        assert torch.equal(weights.read(name, 0, [(half, len(p)), (0, half)]), p.roll(half - len(p), 0)), name
        assert all(q.is_meta for q in empty.parameters())


def test_the_seed_fixes_the_weights_and_leaves_the_callers_randomness_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = tiny_model()
    assert torch.equal(torch.rand(4), expected)
    again, other = tiny_model(), build_model(family(), synthetic.hf_config(), seed=1, dtype=torch.float32)
    weights = [m.get_parameter("lm_head.weight") for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
