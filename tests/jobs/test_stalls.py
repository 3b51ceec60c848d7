from __future__ import annotations

import pytest

from dflop.jobs.stalls import NUM_STEPS, Stalls
from dflop.train.wire import RankTimes


def stalls(*stretches: tuple[float, ...]) -> Stalls:
    """Having seen one tuple per step, an entry per rank."""
    found = Stalls()
    for step, of_ranks in enumerate(stretches):
        found.observe([RankTimes(step, rank, 1.0, {0: 0.1}, stretch) for rank, stretch in enumerate(of_ranks)])
    return found


def factors(found: Stalls, num_ranks: int) -> list[float]:
    return [found.factors().get(rank, 1.0) for rank in range(num_ranks)]


def test_a_rank_for_which_more_time_passes_is_held_up_by_so_much():
    assert factors(stalls(*[(1.02, 1.7, 1.05)] * NUM_STEPS), 3) == pytest.approx([1, 1.7 / 1.05, 1])


def test_of_two_ranks_the_faster_one_is_the_usual_one():
    assert factors(stalls(*[(2.0, 1.0)] * NUM_STEPS), 2) == [2.0, 1.0]


def test_what_happens_to_all_or_now_and_then_or_hardly_holds_nobody_up():
    assert factors(stalls(*[(1.6, 1.6, 1.6)] * NUM_STEPS), 3) == [1, 1, 1]
    assert factors(stalls((1, 3), (1, 1), (1, 1), (1, 4), (1, 1), (1, 1), (1, 5)), 2) == [1, 1]
    assert factors(stalls(*[(1.0, 1.09)] * NUM_STEPS), 2) == [1, 1]


def test_a_few_steps_say_nothing_and_old_ones_are_forgotten():
    assert factors(stalls((1, 2), (1, 2)), 2) == [1, 1]
    slow, usual = [(1.0, 2.0)] * NUM_STEPS, [(1.0, 1.0)] * NUM_STEPS
    assert factors(stalls(*slow, *usual), 2) == [1, 1]
    assert Stalls().factors() == {}
