"""Arrays of a step's times say what its values do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflop.correct.times import StageTime, StepTimes, medians

TIMES = [
    StageTime(("vision", 0, 0), 1.0, {"vision": np.array([0.2, 0.7])}),
    StageTime(("llm", 0, 1), 2.0, {"llm": np.array([1.0, 0.0, 0.5])}),
    StageTime(("vision", 0, 0), 3.0, {"vision": np.array([0.0, 0.1])}),
]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 4)), max_size=40))
def test_medians_are_those_of_each_group(rows):
    values, group = np.array([v for v, _ in rows], dtype=float), np.array([g for _, g in rows], dtype=np.int64)
    found = medians(values, group, 5)
    for g in range(5):
        own = values[group == g]
        assert np.isnan(found[g]) if not len(own) else found[g] == np.median(own)


def test_rows_keep_their_node_and_modules_without_work_have_zeros():
    times = StepTimes.of(TIMES)
    assert [times.nodes[i] for i in times.node] == [time.node for time in TIMES]
    assert times.measured_s.tolist() == [1.0, 2.0, 3.0]
    some = times.rows(np.array([False, True, True]))
    assert some.table({"vision": 2, "llm": 3}).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.5], [0.0, 0.1, 0.0, 0.0, 0.0]]
    assert some.table({"audio": 1}).tolist() == [[0.0], [0.0]]
    assert StepTimes.of([]).table({"llm": 3}).shape == (0, 3)
