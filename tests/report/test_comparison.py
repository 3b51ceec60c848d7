import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.report.comparison import Comparison, compare_policies, verdict
from dflop.report.observed_steps import measured_steps
from tests.report.runs import comparison_of, observe, speedups_of, step_plan

SECONDS = st.floats(0.1, 10.0)
BATCHES = st.lists(
    st.tuples(st.lists(SECONDS, min_size=1, max_size=3), st.lists(SECONDS, min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


def compare(batches: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Comparison:
    seen, plans = comparison_of(batches)
    found = compare_policies(measured_steps(seen), plans, speedups_of(seen, plans))
    assert found is not None
    return found


def test_pairs_by_global_batch_before_averaging() -> None:
    # Batch by batch balanced takes 2/3 and 1/1.5 and 1/1.2 of the time; warm-up steps of 100 s count nowhere.
    found = compare([([3.0, 9.0, 3.0], [2.0, 2.0, 2.0]), ([30.0], [20.0]), ([1.2], [1.0])])
    assert [p.speedup for p in found.pairs] == pytest.approx([1.5, 1.5, 1.2])
    assert found.measured.mean == pytest.approx((1.5 * 1.5 * 1.2) ** (1 / 3))
    assert found.predicted.mean == pytest.approx(1.2)
    arrival, balanced = found.policies
    assert (arrival.num_steps, balanced.num_steps) == (5, 5)
    assert (arrival.step_s, arrival.predicted_step_s) == pytest.approx(((3.0 * 30.0 * 1.2) ** (1 / 3), 1.2))
    assert arrival.step_s / balanced.step_s == pytest.approx(found.measured.mean), "bars, table and sentence agree"
    assert (arrival.step_q1_s, arrival.step_q3_s) == (3.0, 9.0)  # of 1.2, 3, 3, 9, 30
    assert arrival.idle_frac == pytest.approx(statistics.fmean(1 - 0.5 / s for s in (3.0, 9.0, 3.0, 30.0, 1.2)))


def test_every_baseline_is_compared_with_the_same_balanced_steps() -> None:
    policies, predicted = ("arrival", "length_grouped", "balanced"), (1.2, 1.1, 1.0)
    seen, plans = comparison_of([([3.0], [2.0], [1.5])] * 3, policies, predicted)
    found = compare_policies(measured_steps(seen), plans, speedups_of(seen, plans))
    assert found is not None
    assert [p.policy for p in found.policies] == [*policies]
    assert found.policies[1].step_s / found.policies[2].step_s == found.speedups["length_grouped"][0].mean
    assert found.measured.mean == pytest.approx(2.0)
    text = verdict(found, num_processes=1, num_cores=None)
    assert text.startswith("Balanced was faster: its steps took 50.0 % less time than in arrival order")
    assert text.endswith("Over length-grouped steps it was 1.333x (95 % interval 1.333x to 1.333x).")


def test_a_step_without_plan_is_measured_but_not_paired() -> None:
    seen = [observe(0, policy="arrival", step_s=2.0), observe(1, policy="balanced"), observe(2, policy="arrival")]
    plans = [step_plan(0, [5, 6]), step_plan(1, [5, 6])]
    found = compare_policies(measured_steps(seen), plans, speedups_of(seen, plans))
    assert found is not None
    assert [p.num_steps for p in found.policies] == [2, 1]
    assert found.measured.mean == pytest.approx(2.0)


def test_a_comparison_that_was_started_again_counts_with_its_last_attempt() -> None:
    seen, plans = comparison_of([([3.0], [2.0]), ([3.0], [1.0])])
    again = [replace(s, attempt=1, step_s=2.0) for s in seen if s.step in (2, 3)]  # the first batch
    found = compare_policies(measured_steps([*seen, *again]), plans, {})
    assert found is not None
    assert [p.speedup for p in found.pairs] == [1.0]


def test_the_policy_that_ran_counts_not_the_one_that_was_planned() -> None:
    # Rank 0 falls back to arrival order when the plan is late: the observation knows, the plan does not.
    seen = [observe(0, policy="arrival"), observe(1, policy="arrival")]
    found = compare_policies(measured_steps(seen), [step_plan(0, [5], "arrival"), step_plan(1, [5], "balanced")], {})
    assert found is not None
    assert found.pairs == ()


@settings(max_examples=40, deadline=None)
@given(BATCHES)
def test_swapping_the_policies_inverts_the_speedup(batches: list[tuple[list[float], list[float]]]) -> None:
    forward, backward = compare(batches), compare([(b, a) for a, b in batches])
    assert forward.measured.mean * backward.measured.mean == pytest.approx(1.0)


def test_the_example_is_the_batch_of_median_speedup() -> None:
    found = compare([([4.0], [1.0]), ([2.0, 2.1, 8.0], [1.0]), ([1.0], [1.0])])
    pair = found.typical_pair()
    assert pair is not None
    assert pair.speedup == pytest.approx(2.1)
    assert [s.step_s for s in pair.typical()] == [2.1, 1.0]


def say(batches: Sequence[tuple[Sequence[float], Sequence[float]]], num_cores: int | None = None) -> str:
    return verdict(compare(batches), num_processes=4, num_cores=num_cores)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (
            [([1.25], [1.0])] * 3,
            "Balanced was faster: its steps took 20.0 % less time than in arrival order on the same 3 global batches: "
            "measured speedup 1.250x (95 % interval 1.250x to 1.250x). The simulation expected 1.200x (95 % interval "
            "1.200x to 1.200x).",
        ),
        ([([0.8], [1.0])] * 3, "Arrival order was faster: balanced steps took 25.0 % more time on the same 3"),
        (
            [([1.2], [1.0]), ([0.8], [1.0]), ([1.1], [1.0]), ([0.95], [1.0])],
            "No difference beyond noise between balanced steps and arrival order on the same 4 global",
        ),
        ([([2.0], [1.0])], "Undecided: only 1 global batch ran under both policies (measured speedup 2.000x)"),
    ],
)  # fmt: skip
def test_verdict_names_a_winner_where_there_is_one(batches: list[tuple[list[float], list[float]]], text: str) -> None:
    assert say(batches).startswith(text)


def test_verdict_without_comparison_claims_nothing() -> None:
    seen, plans = comparison_of([])
    assert compare_policies(measured_steps(seen), plans, {}) is None, "only warm-up"
    assert compare_policies((), (), {}) is None
    assert verdict(None, num_processes=4, num_cores=None).startswith("Not compared: no global batch was trained in")
    only_arrival = compare_policies(measured_steps([observe(0, policy="arrival")]), [step_plan(0, [1])], {})
    assert verdict(only_arrival, num_processes=4, num_cores=None) == (
        "Not compared: no global batch has measured steps under both policies, so no gain is claimed."
    )


@pytest.mark.parametrize(("num_cores", "shares"), [(2, True), (4, False), (None, False)])
def test_verdict_notes_shared_cores(num_cores: int | None, shares: bool) -> None:
    note = "4 processes share 2 cores, so a waiting process frees its core for others: balancing gains less here"
    assert (note in say([([1.25], [1.0])] * 3, num_cores)) is shares
