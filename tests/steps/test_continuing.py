"""Which job comes next, whoever has died meanwhile. Jobs are played; `test_replanning.py` runs real ones."""

from __future__ import annotations

import pytest

from dflop.errors import Interrupted, LaunchError, TrainError
from dflop.launch import JobState, Journal
from dflop.records import Plan
from dflop.run.directory import RunDir
from dflop.run.plan_scope import PlanBasis, write_basis
from dflop.steps import planning, replanning
from dflop.steps.continuing import Todo, plan_next, what_next
from dflop.steps.replanning import Advice
from tests.jobs.made import save_step
from tests.jobs.played import PLANS, STAGES, PlayedLauncher, advice, decisions, submitted, train

pytestmark = pytest.mark.usefixtures("untold")


@pytest.fixture
def applied(monkeypatch):
    """Advice that was applied; the plan is written as it would be."""
    found: list[Advice] = []

    def apply(run: RunDir, _config: object, advice: Advice) -> None:
        run.write_plan(advice.plans[0], [])
        found.append(advice)

    monkeypatch.setattr(replanning, "apply", apply)
    return found


def test_what_comes_next_follows_from_what_is_on_disk(make_run):
    run, launcher = make_run(), PlayedLauncher()
    assert what_next(run, launcher) is Todo.PLAN
    run.write_plan(PLANS[0], [])
    assert what_next(run, launcher) is Todo.TRAIN
    handle = submitted(run, launcher)
    run.mark_replanning(True)
    assert what_next(run, launcher) is Todo.TRAIN, "the plan of a job that lives is not touched"
    launcher.state[handle.job_id] = JobState.INTERRUPTED
    assert what_next(run, launcher) is Todo.PLAN
    assert Journal(run.path, run.run_id).records()[-1].state == JobState.INTERRUPTED
    run.mark_replanning(False)
    save_step(run, 9)
    assert what_next(run, launcher) is Todo.TRAIN
    save_step(run, 10)
    assert what_next(run, launcher) is Todo.NOTHING


def test_every_stage_is_planned_once(make_run, monkeypatch):
    run, launcher, asked = make_run(STAGES), PlayedLauncher(), []

    def plan_run(run, config, profile_key, say, *, from_step) -> tuple[Plan, ...]:
        asked.append(from_step)
        plan = PLANS[len(asked) - 1]
        write_basis(run, PlanBasis(plan.plan_id, from_step or 0, 0, ("llm",) if len(asked) == 1 else (), ()))
        run.write_plan(plan, [])
        return (plan,)

    monkeypatch.setattr(planning, "plan_run", plan_run)
    assert what_next(run, launcher) is Todo.PLAN
    assert plan_next(run, "key", None, str) == (PLANS[0],)
    assert what_next(run, launcher) is Todo.TRAIN
    save_step(run, 3)
    assert what_next(run, launcher) is Todo.TRAIN, "a run that is taken up again"
    save_step(run, 4)
    assert what_next(run, launcher) is Todo.PLAN
    assert plan_next(run, "key", None, str) == (PLANS[1],)
    save_step(run, 7)
    assert what_next(run, launcher) is Todo.TRAIN
    assert asked == [None, 4]
    (begun,) = decisions(run)
    assert (begun.kind, begun.subject, begun.step, begun.num_steps_left) == ("stage", "all", 4, 6)
    assert (begun.plan_id, begun.new_plan_id) == ("plan-2", "plan-4")
    assert "nothing frozen" in begun.detail


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.QUEUED])
def test_a_job_makes_way_and_is_told_until_it_does(run, applied, monkeypatch, state):
    launcher, wanted = PlayedLauncher(state), advice("done")
    monkeypatch.setattr(replanning, "consider", lambda *_: wanted)
    assert train(run, launcher) is wanted
    assert launcher.told >= 2
    assert run.plan() == PLANS[0], "the plan of a job that lives was changed"
    assert what_next(run, launcher) is Todo.PLAN
    assert plan_next(run, "key", wanted, str) == (PLANS[1],)
    assert (run.plan(), applied, what_next(run, launcher)) == (PLANS[1], [wanted], Todo.TRAIN)
    save_step(run, 10)
    assert what_next(run, launcher) is Todo.NOTHING


@pytest.mark.parametrize("was_told", [False, True])
def test_who_finds_a_marked_job_stops_it_and_asks_again_what_for(run, applied, monkeypatch, was_told):
    """A driver died: before it told the job to stop, or before the job had stopped."""
    launcher = PlayedLauncher()
    handle = submitted(run, launcher)
    run.mark_replanning(True)
    if was_told:
        launcher.interrupt(handle)
    monkeypatch.setattr(replanning, "consider", lambda *_: pytest.fail("it has been decided"))
    assert what_next(run, launcher) is Todo.TRAIN
    assert train(run, launcher) is None
    assert len(launcher.state) == 1, "another job was started beside it"
    assert what_next(run, launcher) is Todo.PLAN
    monkeypatch.setattr(replanning, "advise_now", lambda *_: advice("advised"))
    assert plan_next(run, "key", None, str) == (PLANS[1],)
    assert [a.decision.verdict for a in applied] == ["done"]
    assert what_next(run, launcher) is Todo.TRAIN


def test_a_driver_that_dies_behind_the_change_does_no_harm_and_no_other_is_made_that_does_not_pay(
    run, applied, monkeypatch
):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    run.mark_replanning(True)
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "mark_replanning", fail)
        with pytest.raises(KeyboardInterrupt):
            plan_next(run, "key", advice("done"), str)
    assert run.plan() == PLANS[1]
    monkeypatch.setattr(replanning, "advise_now", lambda *_: advice("stay"))
    assert what_next(run, PlayedLauncher()) is Todo.PLAN
    assert plan_next(run, "key", None, str) == ()
    assert (run.plan(), len(applied), run.is_replanning()) == (PLANS[1], 1, False)
    assert what_next(run, PlayedLauncher()) is Todo.TRAIN


def test_a_job_that_ends_its_stage_first_makes_the_advice_void(make_run, monkeypatch):
    run, launcher = make_run(STAGES), PlayedLauncher()
    run.write_plan(PLANS[0], [])
    write_basis(run, PlanBasis(PLANS[0].plan_id, 0, 0, ("llm",), ()))
    run.mark_replanning(True)
    save_step(run, 4)
    monkeypatch.setattr(planning, "plan_run", lambda *_, from_step: (PLANS[1],))
    assert what_next(run, launcher) is Todo.PLAN
    plan_next(run, "key", advice("done"), str)
    assert [(d.kind, d.verdict) for d in decisions(run)] == [("replan", "failed"), ("stage", "done")]
    assert not run.is_replanning()


@pytest.mark.parametrize("verdict", ["advised", "done"])
def test_advice_alone_stops_nobody(make_run, monkeypatch, verdict):
    run, launcher, asked = make_run("replan.mode=advise"), PlayedLauncher(), []
    run.write_plan(PLANS[0], [])

    def consider(*_: object) -> Advice:
        asked.append(1)
        if len(asked) == 3:
            save_step(run, 10)
            launcher.state = dict.fromkeys(launcher.state, JobState.DONE)
        return advice(verdict)

    monkeypatch.setattr(replanning, "consider", consider)
    assert train(run, launcher) is None
    assert (launcher.told, run.is_replanning()) == (0, False)


@pytest.mark.parametrize(
    ("state", "verdict", "error"),
    [
        (JobState.INTERRUPTED, "", Interrupted),
        (JobState.FAILED, "done", LaunchError),
        (JobState.DONE, "done", None),
    ],
)
def test_a_job_that_ends_as_it_is_asked_to_make_way_ends_the_run(run, monkeypatch, state, verdict, error):
    """Somebody else stops it, it fails, or it has trained its last step."""
    launcher = PlayedLauncher()

    def consider(*_: object) -> Advice | None:
        launcher.state = dict.fromkeys(launcher.state, state)
        return advice(verdict) if verdict else None

    monkeypatch.setattr(replanning, "consider", consider)
    if error is not None:
        with pytest.raises(error):
            train(run, launcher)
        return
    save_step(run, 10)
    train(run, launcher)
    assert what_next(run, launcher) is Todo.NOTHING
    assert not run.is_replanning()
    (told,) = decisions(run)
    assert (told.kind, told.verdict) == ("replan", "failed")
    assert told.detail.startswith("training ended first")


def test_a_job_that_has_nothing_to_do_is_not_started_for_ever(run):
    launcher = PlayedLauncher(JobState.DONE)
    launcher.values = [{"first_step": 10, "num_steps": 10}]
    save_step(run, 8)
    with pytest.raises(TrainError, match="trained to step 10, the newest checkpoint seen here is of step 8"):
        train(run, launcher)
    launcher.values = [{"first_step": 8, "num_steps": 10}]
    assert train(run, launcher) is None, "its checkpoint may be on its way"
