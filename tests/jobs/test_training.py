"""Whole jobs, two ranks and a scheduler that dies, lags or is silent: they train what they would have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import QUICK
from dflop.records import RunEvent, StepObservation, StepPlan
from dflop.store.spool import read_spool
from tests.jobs.training import fresh, losses_of, planned_run, run_ranks

NUM_STEPS = 16
STEPS = list(range(NUM_STEPS))

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    return planned_run(tmp_path_factory.mktemp("job"), f"train.num_steps={NUM_STEPS}")


@pytest.fixture
def train(planned, tmp_path) -> Callable[[str], RunDir]:
    """Trains a copy of the run, undisturbed or with an accident, to its end."""

    def run(accident: str = "") -> RunDir:
        copy = fresh(planned, tmp_path / (accident or "undisturbed"))
        entry = ["tests.jobs.disturbed", accident, str(copy.path)]
        ended = run_ranks(copy, *(entry if accident else ["dflop.jobs.train", str(copy.path), "train"]))
        assert ended.codes == (0, 0), "\n".join(ended.stderr)
        for _, kind, detail in events(copy):
            if kind != "scheduler_behind":  # that one is in the scheduler's own log
                assert f"{kind.replace('_', ' ')}: {detail}" in ended.stderr[0]
        return copy

    return run


def events(run: RunDir) -> list[tuple[int, str, str]]:
    found = sorted(read_spool(run.config().store, RunEvent), key=lambda e: e.observed_at_s)
    return [(e.step, e.kind, e.detail) for e in found]


def happened(run: RunDir, *kinds: str) -> list[tuple[int, str]]:
    return [(step, kind.removeprefix("scheduler_")) for step, kind, _ in events(run) if kind.endswith(kinds)]


def policies(run: RunDir) -> list[str]:
    """What ran, step by step; every step is in the store once, whoever planned it and whatever became of them."""
    plans = sorted(read_spool(run.config().store, StepPlan), key=lambda p: p.step)
    assert [p.step for p in plans] == STEPS
    seen = {(o.step, o.rank): o for o in read_spool(run.config().store, StepObservation)}
    assert sorted(seen) == [(step, rank) for step in STEPS for rank in (0, 1)]
    assert [seen[step, 0].policy for step in STEPS] == [p.policy for p in plans]
    return [p.policy for p in plans]


def losses(run: RunDir) -> list[float]:
    found = losses_of(run)
    return [found[step] for step in STEPS]


def test_a_killed_scheduler_changes_no_loss_and_comes_back(train):
    undisturbed, killed = train(), train("killed")
    assert losses(killed) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert happened(undisturbed, "dead", "restarted", "given_up") == []
    assert happened(killed, "dead", "restarted", "given_up") == [
        (3, "dead"), (4, "restarted"), (5, "dead"), (9, "restarted"),
    ]  # fmt: skip
    ran = policies(killed)
    assert set(ran[6:11]) == {QUICK}, "nobody else was there to plan"
    assert QUICK not in ran[11:14], "its third start was waited for"


def test_a_scheduler_that_always_dies_is_given_up(train):
    run = train("dying")
    assert set(policies(run)) == {QUICK}
    assert happened(run, "dead", "restarted", "given_up") == [
        (0, "dead"), (1, "restarted"), (2, "dead"), (6, "restarted"), (7, "dead"), (7, "given_up"),
    ]  # fmt: skip


def test_a_scheduler_that_says_nothing_holds_nobody_up(train):
    run = train("mute")
    assert set(policies(run)) == {QUICK}
    assert happened(run, "") == [(step, "late") for step in STEPS]


def test_a_slow_scheduler_is_overtaken_and_catches_up(train):
    run = train("slow")
    ran = policies(run)
    late, behind = happened(run, "late"), happened(run, "behind")
    # The first ones may be quick because kernels compile: then the scheduler made them itself.
    assert ran[0] == QUICK
    assert late, "rank 0 waited for it"
    assert {ran[step] for step, _ in late} == {QUICK}
    assert behind, "it never noticed"
    assert {step for step, _ in behind} & set(range(7))
    assert set(ran[6:]) != {QUICK}, "it stayed late for ever"
