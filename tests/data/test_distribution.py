import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.distribution import drift, quantiles, sample_batches, summary
from dflop.errors import DataError
from tests.builders import make_sample


def frame(llm: list[int] | np.ndarray, vision: list[int] | None = None, group: str = "text", **more) -> pl.DataFrame:
    columns = {"group": [group] * len(llm), "weight": 1.0, "llm_items": llm, "llm_tokens": llm}
    encoder = {} if vision is None else {"vision_items": vision, "vision_tokens": vision}
    return pl.DataFrame({**columns, **encoder, **more}, strict=False)


def test_summary_agrees_with_numpy():
    lengths = np.random.default_rng(0).integers(1, 10_000, 301)
    table = summary(pl.concat([frame(lengths, [0] * 301), frame([500], [400], "video")]))
    row = table.row(0, named=True)
    assert (row["group"], row["module"], row["num_samples"], row["max_tokens"]) == ("text", "llm", 301, max(lengths))
    for q in (50, 90, 99):
        assert row[f"p{q}_tokens"] == np.quantile(lengths, q / 100, method="inverted_cdf")
    assert summary(frame([])).is_empty()
    keys = table.select("group", "module").rows()
    assert keys == [("text", "llm"), ("video", "llm"), ("video", "vision"), ("all", "llm"), ("all", "vision")]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5)), min_size=1, max_size=30), st.floats(0.01, 1))
def test_weighted_quantiles_are_those_of_repeated_samples(draws, share):
    values, weights = np.array(draws).T
    (found,) = quantiles(values, weights * 0.1, [share])
    repeated = np.sort(np.repeat(values, weights))
    assert found == repeated[math.ceil(share * len(repeated) - 1e-9) - 1]


def test_batches_and_quantiles_follow_the_weights():
    weights = [100.0 if i < 10 else 0.01 for i in range(200)]
    shapes = [replace(make_sample(i, 10 + i), weight=weight) for i, weight in enumerate(weights)]
    drawn = [s.sample_index for batch in sample_batches(shapes, 5, 20, seed=0) for s in batch]
    assert np.mean(np.array(drawn) < 10) > 0.95
    row = summary(frame(np.arange(10, 210), weight=weights)).row(0, named=True)
    assert (row["num_samples"], row["p50_tokens"], row["p99_tokens"], row["max_tokens"]) == (200, 15, 19, 209)


def test_batches_are_drawn_without_replacement_and_by_seed():
    shapes = [make_sample(i, 10) for i in range(20)]
    batches = sample_batches(shapes, 8, 5, seed=1)
    assert [len({s.sample_index for s in batch}) for batch in batches] == [8] * 5
    assert batches == sample_batches(shapes, 8, 5, seed=1)
    assert batches != sample_batches(shapes, 8, 5, seed=2)
    assert len(sample_batches(shapes, 100, 1, seed=1)[0]) == 20
    with pytest.raises(DataError, match="no valid samples"):
        sample_batches([], 8, 1, seed=0)


# How far one distribution has moved from another


tokens = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@settings(max_examples=40)
@given(tokens, tokens)
def test_distance_is_scipys(before, after):
    import scipy.stats  # a second of every collection

    (found,) = [s for s in drift(frame(before), frame(after)).shifts if s.quantity == "llm_tokens"]
    assert found.distance == pytest.approx(scipy.stats.ks_2samp(before, after).statistic)


@settings(max_examples=40)
@given(tokens, st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4)), min_size=1, max_size=20))
def test_a_weight_is_a_repetition(before, weighted):
    values, weights = zip(*weighted, strict=True)
    repeated = [v for v, w in weighted for _ in range(w)]
    one, other = drift(frame(before), frame(list(values), weight=weights)), drift(frame(before), frame(repeated))
    assert [s.distance for s in one.shifts] == pytest.approx([s.distance for s in other.shifts])


def test_chance_is_seldom_exceeded_and_a_change_always():
    rng = np.random.default_rng(0)
    false_alarms = 0
    for _ in range(100):
        a, b = (rng.lognormal(6, 1, n).astype(int) for n in (400, 700))
        false_alarms += bool(drift(frame(a), frame(b)).beyond(0))
        assert drift(frame(a), frame((b * 1.5).astype(int))).beyond(0.05)
    assert false_alarms <= 8  # 5 expected


def test_modules_and_groups_that_only_one_side_has():
    found = drift(frame([5] * 9), frame([5] * 9, vision=[7] * 9, group="video"))
    assert {s.quantity: s.distance for s in found.shifts} == {"group": 1.0, "vision_tokens": 1.0, "llm_tokens": 0.0}
    assert found.distance == 1.0
    assert math.isnan({s.quantity: s.mean_ratio for s in found.shifts}["vision_tokens"])


def test_nothing_to_compare():
    with pytest.raises(DataError, match="no distribution"):
        drift(frame([]), frame([1]))
