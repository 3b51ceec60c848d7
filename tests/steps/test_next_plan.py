"""Which plan comes next, whoever has died meanwhile. Jobs are played; `test_replanning.py` runs real ones."""

import pytest

from dflop.errors import ConfigError
from dflop.launch import JobState, Journal
from dflop.records import Plan
from dflop.run.directory import RunDir
from dflop.run.plan_scope import PlanBasis, write_basis
from dflop.steps import next_plan as module
from dflop.steps import planning, replanning
from dflop.steps.next_plan import next_plan
from dflop.steps.replanning import Advice
from dflop.steps.training import trained_so_far
from tests.jobs.made import save_step
from tests.jobs.played import PLANS, STAGES, PlayedLauncher, advice, decisions, submitted, train

pytestmark = pytest.mark.usefixtures("untold")


@pytest.fixture(autouse=True)
def profiled(monkeypatch):
    monkeypatch.setattr(module, "_profiled_key", lambda *_: "key")


@pytest.fixture
def applied(monkeypatch):
    """Advice that was applied; the plan is written as it would be."""
    found: list[Advice] = []

    def apply(run: RunDir, _config: object, advice: Advice) -> None:
        run.write_plan(advice.plans[0], [])
        found.append(advice)

    monkeypatch.setattr(replanning, "apply", apply)
    return found


def test_what_comes_next_follows_from_what_is_on_disk(make_run, applied, monkeypatch):
    run, launcher = make_run(), PlayedLauncher()
    monkeypatch.setattr(replanning, "advise_now", lambda *_: advice("advised"))
    run.write_plan(PLANS[0], [])
    handle = submitted(run, launcher)
    run.mark_replanning(True)
    assert next_plan(run, launcher, None, str) == (PLANS[0],), "the plan of a job that lives is not touched"
    save_step(run, 9)
    launcher.state[handle.job_id] = JobState.INTERRUPTED
    assert next_plan(run, launcher, None, str) == (PLANS[1],)
    assert Journal(run.path, run.run_id).records()[-1].state == JobState.INTERRUPTED
    assert next_plan(run, launcher, None, str) == (PLANS[1],), "that is done"
    assert len(applied) == 1
    assert not trained_so_far(run, launcher).is_over
    save_step(run, 10)
    assert trained_so_far(run, launcher).is_over
    submitted(run, launcher)
    assert not trained_so_far(run, launcher).is_over, "a job that lives is waited for"


def test_a_run_without_profiles_is_not_planned(make_run, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="the dataset of the run is not profiled yet"):
        next_plan(make_run(), PlayedLauncher(), None, str)


def test_every_stage_is_planned_once(make_run, monkeypatch):
    run, launcher, asked = make_run(STAGES), PlayedLauncher(), []

    def plan_run(run, config, profile_key, say, *, from_step) -> tuple[Plan, ...]:
        asked.append(from_step)
        plan = PLANS[len(asked) - 1]
        write_basis(run, PlanBasis(plan.plan_id, from_step or 0, 0, ("llm",) if len(asked) == 1 else (), ()))
        run.write_plan(plan, [])
        return (plan,)

    monkeypatch.setattr(planning, "plan_run", plan_run)
    assert next_plan(run, launcher, None, str) == (PLANS[0],)
    save_step(run, 3)
    assert next_plan(run, launcher, None, str) == (PLANS[0],), "a run that is taken up again"
    save_step(run, 4)
    assert next_plan(run, launcher, None, str) == (PLANS[1],)
    save_step(run, 7)
    assert next_plan(run, launcher, None, str) == (PLANS[1],)
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
    assert next_plan(run, launcher, wanted, str) == (PLANS[1],)
    assert (run.plan(), applied, run.is_replanning()) == (PLANS[1], [wanted], False)


@pytest.mark.parametrize("was_told", [False, True])
def test_who_finds_a_marked_job_stops_it_and_asks_again_what_for(run, applied, monkeypatch, was_told):
    """A driver died: before it told the job to stop, or before the job had stopped."""
    launcher = PlayedLauncher()
    handle = submitted(run, launcher)
    run.mark_replanning(True)
    if was_told:
        launcher.interrupt(handle)
    monkeypatch.setattr(replanning, "consider", lambda *_: pytest.fail("it has been decided"))
    assert train(run, launcher) is None
    assert len(launcher.state) == 1, "another job was started beside it"
    monkeypatch.setattr(replanning, "advise_now", lambda *_: advice("advised"))
    assert next_plan(run, launcher, None, str) == (PLANS[1],)
    assert [a.decision.verdict for a in applied] == ["done"]


def test_a_driver_that_dies_behind_the_change_does_no_harm_and_no_other_is_made_that_does_not_pay(
    run, applied, monkeypatch
):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    run.mark_replanning(True)
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "mark_replanning", fail)
        with pytest.raises(KeyboardInterrupt):
            next_plan(run, PlayedLauncher(), advice("done"), str)
    assert run.plan() == PLANS[1]
    monkeypatch.setattr(replanning, "advise_now", lambda *_: advice("stay"))
    assert next_plan(run, PlayedLauncher(), None, str) == (PLANS[1],)
    assert (run.plan(), len(applied), run.is_replanning()) == (PLANS[1], 1, False)


def test_a_job_that_ends_its_stage_first_makes_the_advice_void(make_run, monkeypatch):
    run, launcher = make_run(STAGES), PlayedLauncher()
    run.write_plan(PLANS[0], [])
    write_basis(run, PlanBasis(PLANS[0].plan_id, 0, 0, ("llm",), ()))
    run.mark_replanning(True)
    save_step(run, 4)
    monkeypatch.setattr(planning, "plan_run", lambda *_, from_step: (PLANS[1],))
    next_plan(run, launcher, advice("done"), str)
    assert [(d.kind, d.verdict) for d in decisions(run)] == [("replan", "failed"), ("stage", "done")]
    assert not run.is_replanning()
