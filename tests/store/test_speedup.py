"""A run's speed-up has one definition, `v_speedup`; that of simulated steps, which are in no store, equals it."""

import math
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records.speedup import MIN_BATCHES, NOT_COMPARED, Speedup, speedup
from dflop.store import migrate
from dflop.store.reader import Reader
from tests.report.runs import comparison_of, speedups_of
from tests.store.asking import fill, named, rows

SECONDS = st.floats(1e-3, 1e3)
NONSENSE = st.sampled_from([0.0, -1.0, math.nan, math.inf, None])
BATCH = st.tuples(*[SECONDS] * 4) | st.tuples(*[SECONDS | NONSENSE] * 4)


@pytest.fixture(scope="module")
def empty() -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    migrate.apply(con)
    return con


@settings(max_examples=30)
@given(st.lists(BATCH, max_size=8))
def test_the_view_is_the_function_and_nonsense_keeps_nobody_from_it(empty, batches) -> None:
    empty.execute("delete from comparison_rollup")
    for number, batch in enumerate(batches):
        empty.execute(
            "insert into comparison_rollup by name select 'run' as run_id, 'arrival' as baseline, ? as first_step, "
            "1 as num_samples, 1 as num_baseline_steps, 1 as num_balanced_steps, ? as baseline_step_s, "
            "? as balanced_step_s, ? as baseline_predicted_s, ? as balanced_predicted_s",
            [number, *batch],
        )
    good = [b for b in batches if _is_time(b[0]) and _is_time(b[1])]
    measured = speedup([b[0] for b in good], [b[1] for b in good])
    is_simulated = all(_is_time(b[2]) and _is_time(b[3]) for b in good)
    predicted = speedup([b[2] for b in good], [b[3] for b in good]) if is_simulated else NOT_COMPARED
    found = empty.execute("from v_speedup").fetchall()
    assert len(found) == bool(good)
    for _, _, num_batches, *values in found:
        expected = [v for s in (measured, predicted) for v in (s.mean, s.low, s.high)]
        assert [math.nan if v is None else v for v in values] == pytest.approx(expected, nan_ok=True)
        assert num_batches == measured.num_batches


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and 0 < seconds < math.inf


@pytest.mark.parametrize(
    ("num_degrees", "quantile"), [(2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423)]
)
def test_the_interval_is_students(num_degrees: int, quantile: float) -> None:
    ratios = [1.0 + 0.1 * i for i in range(num_degrees + 1)]
    logs = [math.log(r) for r in ratios]
    mean = sum(logs) / len(logs)
    half = quantile * math.sqrt(sum((x - mean) ** 2 for x in logs) / num_degrees / len(logs))
    found = speedup(ratios, [1.0] * len(ratios))
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((mean - half, mean + half), abs=0.003 * half)


def test_repeats_and_restarts_give_one_figure_wherever_one_asks(tmp_path: Path, make) -> None:
    batches = [([3.0, 9.0, 3.1], [4.0], [2.0, 2.1]), ([30.0], [10.0, 11.0], [20.0]), ([1.2], [1.1], [1.0])]
    seen, plans = comparison_of(batches, ("arrival", "token_kk", "balanced"), (1.2, 1.1, 1.0))
    again = [make.observation(s, run_id="run/compare", attempt=0, step_s=99.0) for s in range(2)]  # before the restart
    seen = [_as_of(make, s) for s in seen]
    fill(tmp_path, make.run(), make.plan(), *again, *seen, *plans)
    with Reader(tmp_path) as reader:
        found = reader.speedups("run")
        assert reader.speedups("nobody") == {}
    expected = speedups_of(seen, plans)
    assert set(found) == set(expected) == {"arrival", "token_kk"}
    for baseline, both in found.items():
        assert [_values(one) for one in both] == [pytest.approx(_values(one)) for one in expected[baseline]]
    measured, predicted = found["arrival"]
    assert measured.num_batches == MIN_BATCHES
    for (row,) in (
        rows(tmp_path, "from v_run_summary"),
        named(tmp_path, "runs"),
        rows(tmp_path, "from v_speedup where baseline = 'arrival'"),
    ):
        assert tuple(row[f"measured_speedup{end}"] for end in ("", "_low", "_high")) == _values(measured)
        assert tuple(row[f"predicted_speedup{end}"] for end in ("", "_low", "_high")) == _values(predicted)


def _as_of(make, seen):
    told = {"policy": seen.policy, "step_s": seen.step_s, "predicted_step_s": seen.predicted_step_s}
    return make.observation(seen.step, run_id="run/compare", attempt=1, **told)


def _values(found: Speedup) -> tuple[float, float, float]:
    return found.mean, found.low, found.high
