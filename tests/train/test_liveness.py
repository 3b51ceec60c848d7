from __future__ import annotations

import pytest

from dflop.train.liveness import Judge, Mode, Sign, Spell

LABELS = ("rank 0", "rank 1", "rank 2")
STALL_S, GONE_S = 60.0, 4.0
IDLE = Spell("the step before", Mode.WAITS, 0.0)


def make_judge(now_s: float = 0.0) -> Judge:
    return Judge(LABELS, now_s, stall_s=STALL_S, gone_s=GONE_S)


def sign(
    number: int, mode: Mode = Mode.WORKS, age_s: float = 0.1, *, feed: Spell = IDLE, hung_up: bool = False
) -> Sign:
    return Sign(Spell(f"{mode} {number}", mode, age_s), feed, hung_up)


@pytest.mark.parametrize("mode", [Mode.WORKS, Mode.MAY_LAST])
def test_all_is_well_while_somebody_moves_or_does_what_may_last(mode):
    judge = make_judge()
    for now in range(0, 300, 10):
        judge.hear(0, sign(now) if mode is Mode.WORKS else sign(now, Mode.WAITS, now), now)
        judge.hear(1, sign(now, Mode.WAITS, now), now)
        judge.hear(2, sign(now, mode, now), now)
        assert judge.verdict(now) == ""


def test_a_silent_rank_is_missed_when_its_time_is_over_and_soon_when_a_peer_was_hung_up_on():
    judge = make_judge()
    for rank in range(3):
        judge.hear(rank, sign(1), 0.0)
    for rank in (0, 1):
        judge.hear(rank, sign(2), 59.0)
    judge.hear(2, sign(1), 59.0)  # the same again: it was read, not said
    assert judge.verdict(59.0) == ""
    found = judge.verdict(61.0)
    assert found.startswith("rank 2 sent no heartbeat")
    assert "works 1" in found

    judge = make_judge()
    for rank in range(3):
        judge.hear(rank, sign(1), 0.0)
    judge.hear(0, sign(2, hung_up=True), 3.0)
    judge.hear(1, sign(2), 3.0)
    assert judge.verdict(3.5) == ""
    assert judge.verdict(4.5).startswith("rank 2 sent no heartbeat")


def test_of_several_that_fell_silent_the_first_is_named_and_one_that_was_never_seen_is_missed():
    judge = make_judge()
    for rank, now_s in ((0, 9.0), (1, 2.0), (2, 1.0)):
        judge.hear(rank, sign(1, hung_up=rank == 0), now_s)
    assert judge.verdict(9.0).startswith("rank 2 sent no heartbeat")

    judge = make_judge(now_s=100.0)
    for now in (100.0, 161.0):
        judge.hear(0, sign(int(now)), now)
        judge.hear(1, sign(int(now)), now)
    found = judge.verdict(161.0)
    assert (found.startswith("rank 2"), "never seen" in found) == (True, True)


@pytest.mark.parametrize("thread", ["main", "feed"])
def test_the_rank_that_works_is_stuck_not_those_that_wait_for_it(thread):
    judge, stuck = make_judge(), Spell("step 3, media x.jpg", Mode.WORKS, 65.0, "feed.py:12")
    judge.hear(0, sign(1, Mode.WAITS, 64.0), 0.0)
    judge.hear(1, sign(1, Mode.WAITS, 63.0), 0.0)
    own = Sign(stuck, IDLE) if thread == "main" else sign(1, Mode.WAITS, 64.0, feed=stuck)
    judge.hear(2, own, 0.0)
    assert judge.verdict(1.0) == "rank 2 is stuck: step 3, media x.jpg, for 1 min 5 s, at feed.py:12"


def test_where_all_wait_for_one_another_all_are_named():
    judge = make_judge()
    for rank in range(3):
        judge.hear(rank, sign(rank, Mode.WAITS, 61.0 + rank), 0.0)
    named = [line.partition(":")[0] for line in judge.verdict(0.0).splitlines()]
    assert named == ["all ranks wait for each other", *LABELS]


def test_work_that_was_begun_later_than_all_began_to_wait_is_waited_for_and_then_named():
    judge = make_judge()
    for age_s, is_stuck in ((STALL_S - 1, False), (STALL_S + 1, True)):
        now_s = STALL_S + age_s
        for rank in (0, 1):
            judge.hear(rank, sign(int(now_s), Mode.WAITS, age_s + 2), now_s)
        judge.hear(2, sign(int(now_s), Mode.WAITS, age_s + 2, feed=Spell("media", Mode.WORKS, age_s)), now_s)
        found = judge.verdict(now_s)
        assert found == ("rank 2 is stuck: media, for 1 min 1 s" if is_stuck else "")
