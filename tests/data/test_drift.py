from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.drift import drift
from dflop.errors import DataError


def frame(llm: list[int] | np.ndarray, vision: list[int] | None = None, group: str = "text", **more) -> pl.DataFrame:
    columns = {"group": [group] * len(llm), "llm_items": llm, "llm_tokens": llm, "llm_sum_sq_tokens": llm}
    encoder = {} if vision is None else {"vision_items": vision, "vision_tokens": vision}
    return pl.DataFrame({**columns, **encoder, **more}, strict=False)


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
