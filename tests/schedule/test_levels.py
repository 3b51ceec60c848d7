"""Levels for aggregated loads agree with what the scheduler predicts item by item."""

from __future__ import annotations

import pytest

from dflop.records import LLM, ModuleFactors
from dflop.schedule.levels import levelled
from tests.builders import make_cost, make_sample, random_batch

BY_SIZE = ModuleFactors(LLM, level=9.0, edges=(100, 200), factors=(1.0, 2.0, 4.0))


def test_the_level_is_the_mean_factor_weighted_by_seconds():
    cost = make_cost("vision").with_corrections({LLM: BY_SIZE, "vision": 1.5})
    batches = [[make_sample(0, 50), make_sample(1, 150)], [make_sample(2, 300)]]
    plain = cost.uncorrected()
    seconds = [float(plain.item_seconds(LLM, 10, n, n**2, num_layers=4, edge=True)) for n in (50, 150, 300)]
    expected = sum(f * s for f, s in zip((1.0, 2.0, 4.0), seconds, strict=True)) / sum(seconds)
    found = levelled(cost, batches)
    assert found.level(LLM) == pytest.approx(expected)
    assert found.item_factors(LLM, [50, 150, 300]).tolist() == [1.0, 2.0, 4.0]
    assert found.corrections["vision"] == 1.5
    assert cost.level(LLM) == 9.0


def test_modules_without_items_or_without_buckets_keep_their_level():
    vision = ModuleFactors("vision", 1.25, (10,), (1.0, 2.0))
    cost = make_cost("vision").with_corrections({LLM: ModuleFactors(LLM, 1.5), "vision": vision})
    found = levelled(cost, [[make_sample(0, 50)]])
    assert (found.level(LLM), found.level("vision")) == (1.5, 1.25)
    alike = {LLM: ModuleFactors(LLM, 1.1, (100,), (1.1, 1.1))}
    assert levelled(cost.with_corrections(alike), [random_batch(8)]).corrections == alike
    with_media = levelled(cost, [random_batch(8, encoders=("vision",))])
    assert 1.0 <= with_media.level("vision") <= 2.0
