"""Which job comes next, whoever has died meanwhile. Jobs are played; `test_replanned_job.py` runs real ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import uuid
from pathlib import Path

import pytest

from dflop.config import dump_config
from dflop.errors import Interrupted, LaunchError, TrainError
from dflop.jobs import planning, replan, reprofile, submit
from dflop.jobs.basis import PlanBasis, write_basis
from dflop.jobs.continuing import Todo, plan_next, train_once, what_next
from dflop.jobs.replan import Advice
from dflop.jobs.reprofile import Reprofile
from dflop.jobs.rounds import Rounds, Teller
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import TRAIN
from dflop.launch import JobHandle, JobSpec, JobState, JobStatus, Journal
from dflop.launch.job import CHECKPOINTED, OneByOne, make_folder
from dflop.records import LLM, Decision, Plan
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from dflop.train import manifest
from tests.builders import make_plan
from tests.jobs.configs import make_config

PLANS = [
    dataclasses.replace(make_plan({"vision": 1, LLM: 1}, num_microbatches=n), plan_id=f"plan-{n}", reason=f"for {n}")
    for n in (2, 4)
]
STAGES = "stages=[{name: projector, num_steps: 4, frozen: [llm]}, {name: all}]"


@pytest.fixture
def make_run(tmp_path):
    def make(*overrides: str) -> RunDir:
        run = RunDir(tmp_path / "runs" / "small-1")
        run.path.mkdir(parents=True)
        settings = ("train.num_steps=10", "replan.check_every_s=0.01", "replan.mode=act", *overrides)
        run.config_file.write_text(dump_config(make_config(tmp_path, *settings)))
        return run

    return make


@pytest.fixture
def run(make_run):
    """With a plan, and no job yet."""
    run = make_run()
    run.write_plan(PLANS[0], [])
    return run


class PlayedLauncher(OneByOne):
    """Its jobs are in whatever state a test gives them; those that are told to stop do so when they are told again."""

    backend = "played"

    def __init__(self, state: JobState = JobState.RUNNING) -> None:
        self.state, self.told = {}, 0
        self.first_state, self.values = state, [{"first_step": 0, "num_steps": 10}]

    def submit(self, spec: JobSpec) -> JobHandle:
        handle = JobHandle("played", uuid.uuid4().hex, spec.name, spec.key, make_folder(spec.folder), 1, 0.0)
        self.state[handle.job_id] = self.first_state
        return handle

    def poll(self, handle: JobHandle) -> JobStatus:
        return JobStatus(self.state[handle.job_id])

    def interrupt(self, handle: JobHandle) -> None:
        self.told += 1
        if self.told > 1 and not self.state[handle.job_id].is_final:  # the first time it did not hear
            queued = self.state[handle.job_id] is JobState.QUEUED
            self.state[handle.job_id] = JobState.CANCELLED if queued else JobState.INTERRUPTED

    def cancel(self, *handles: JobHandle) -> None:
        for handle in handles:
            assert not self.state[handle.job_id].is_final
            self.state[handle.job_id] = JobState.CANCELLED

    def collect(self, handle: JobHandle) -> list[dict[str, int]]:
        state = self.state[handle.job_id]
        if state is JobState.INTERRUPTED:
            raise Interrupted(CHECKPOINTED)
        if state is not JobState.DONE:
            raise LaunchError(f"the job is {state}")
        return self.values


def submitted(run: RunDir, launcher: PlayedLauncher) -> JobHandle:
    """A job of a driver that died right afterwards."""
    handle = launcher.submit(submit.train_job(run, run.config(), TRAIN, 1))
    Journal(run.path, run.run_id).submitted(handle)
    return handle


def trained_to(run: RunDir, next_step: int) -> None:
    folder = run.checkpoints / manifest.name_of(next_step)
    folder.mkdir(parents=True)
    (folder / manifest.MANIFEST).write_text(json.dumps({"meta": {"next_step": next_step}, "files": {}}))
    (run.checkpoints / manifest.LATEST).write_text(json.dumps({"next_step": next_step}))


def decision(verdict: str, at_s: float = math.inf) -> Decision:
    return Decision(
        "small-1", 1, 3, "replan", "layout", verdict, math.nan, math.nan, 9.0, 1.0, 6, "plan-2", "plan-4", "", at_s
    )


def advice(verdict: str) -> Advice:
    return Advice(decision(verdict), plans=(PLANS[1],))


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    """Nothing is ingested, which takes a second a round; tests that want it undo this."""

    async def tell(_: Teller) -> None:
        """Nothing."""

    monkeypatch.setattr(Teller, "tell", tell)


@pytest.fixture
def applied(monkeypatch):
    """Advice that was applied; the plan is written as it would be."""
    found: list[Advice] = []

    def apply(run: RunDir, _config: object, advice: Advice) -> None:
        run.write_plan(advice.plans[0], [])
        found.append(advice)

    monkeypatch.setattr(replan, "apply", apply)
    return found


def decisions(run: RunDir) -> list[Decision]:
    return list(read_spool(run.config().store, Decision))


async def nobody() -> None:
    """Who is interested in decisions."""


def train(run: RunDir, launcher: PlayedLauncher, say=str) -> Advice | None:
    return asyncio.run(train_once(run, launcher, say, Teller(run, say, nobody)))


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
    trained_to(run, 9)
    assert what_next(run, launcher) is Todo.TRAIN
    trained_to(run, 10)
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
    trained_to(run, 3)
    assert what_next(run, launcher) is Todo.TRAIN, "a run that is taken up again"
    trained_to(run, 4)
    assert what_next(run, launcher) is Todo.PLAN
    assert plan_next(run, "key", None, str) == (PLANS[1],)
    trained_to(run, 7)
    assert what_next(run, launcher) is Todo.TRAIN
    assert asked == [None, 4]
    (begun,) = decisions(run)
    assert (begun.kind, begun.subject, begun.step, begun.num_steps_left) == ("stage", "all", 4, 6)
    assert (begun.plan_id, begun.new_plan_id) == ("plan-2", "plan-4")
    assert "nothing frozen" in begun.detail


def test_a_job_makes_way_and_is_told_until_it_does(run, applied, monkeypatch):
    launcher, wanted = PlayedLauncher(), advice("done")
    monkeypatch.setattr(replan, "consider", lambda *_: wanted)
    assert train(run, launcher) is wanted
    assert launcher.told >= 2
    assert run.plan() == PLANS[0], "the plan of a job that lives was changed"
    assert what_next(run, launcher) is Todo.PLAN
    assert plan_next(run, "key", wanted, str) == (PLANS[1],)
    assert (run.plan(), applied, what_next(run, launcher)) == (PLANS[1], [wanted], Todo.TRAIN)
    trained_to(run, 10)
    assert what_next(run, launcher) is Todo.NOTHING


def test_a_job_in_the_queue_makes_way_too(run, monkeypatch):
    monkeypatch.setattr(replan, "consider", lambda *_: advice("done"))
    assert train(run, PlayedLauncher(JobState.QUEUED)) is not None


@pytest.mark.parametrize("was_told", [False, True])
def test_who_finds_a_marked_job_stops_it_and_asks_again_what_for(run, applied, monkeypatch, was_told):
    """A driver died: before it told the job to stop, or before the job had stopped."""
    launcher = PlayedLauncher()
    handle = submitted(run, launcher)
    run.mark_replanning(True)
    if was_told:
        launcher.interrupt(handle)
    monkeypatch.setattr(replan, "consider", lambda *_: pytest.fail("it has been decided"))
    assert what_next(run, launcher) is Todo.TRAIN
    assert train(run, launcher) is None
    assert len(launcher.state) == 1, "another job was started beside it"
    assert what_next(run, launcher) is Todo.PLAN
    monkeypatch.setattr(replan, "advise_now", lambda *_: advice("advised"))
    assert plan_next(run, "key", None, str) == (PLANS[1],)
    assert [a.decision.verdict for a in applied] == ["done"]
    assert what_next(run, launcher) is Todo.TRAIN


def test_a_run_stays_with_its_plan_if_another_does_not_pay_any_more(run, applied, monkeypatch):
    run.mark_replanning(True)
    monkeypatch.setattr(replan, "advise_now", lambda *_: advice("stay"))
    assert plan_next(run, "key", None, str) == ()
    assert (run.plan(), applied, run.is_replanning()) == (PLANS[0], [], False)


def test_a_driver_that_dies_behind_the_change_does_no_harm(run, applied, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    run.mark_replanning(True)
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "mark_replanning", fail)
        with pytest.raises(KeyboardInterrupt):
            plan_next(run, "key", advice("done"), str)
    assert run.plan() == PLANS[1]
    monkeypatch.setattr(replan, "advise_now", lambda *_: advice("stay"))
    assert what_next(run, PlayedLauncher()) is Todo.PLAN
    plan_next(run, "key", None, str)
    assert run.plan() == PLANS[1]
    assert what_next(run, PlayedLauncher()) is Todo.TRAIN


def test_a_job_that_ends_its_stage_first_makes_the_advice_void(make_run, monkeypatch):
    run, launcher = make_run(STAGES), PlayedLauncher()
    run.write_plan(PLANS[0], [])
    write_basis(run, PlanBasis(PLANS[0].plan_id, 0, 0, ("llm",), ()))
    run.mark_replanning(True)
    trained_to(run, 4)
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
            trained_to(run, 10)
            launcher.state = dict.fromkeys(launcher.state, JobState.DONE)
        return advice(verdict)

    monkeypatch.setattr(replan, "consider", consider)
    assert train(run, launcher) is None
    assert (launcher.told, run.is_replanning()) == (0, False)


def test_a_job_that_somebody_else_stops_ends_the_run(run, monkeypatch):
    launcher = PlayedLauncher()

    def consider(*_: object) -> None:
        launcher.state = dict.fromkeys(launcher.state, JobState.INTERRUPTED)

    monkeypatch.setattr(replan, "consider", consider)
    with pytest.raises(Interrupted):
        train(run, launcher)


def test_a_job_that_fails_while_it_makes_way_has_failed(run, monkeypatch):
    launcher = PlayedLauncher()

    def consider(*_: object) -> Advice:
        launcher.state = dict.fromkeys(launcher.state, JobState.FAILED)
        return advice("done")

    monkeypatch.setattr(replan, "consider", consider)
    with pytest.raises(LaunchError, match="the job is failed"):
        train(run, launcher)


def test_a_job_that_has_nothing_to_do_is_not_started_for_ever(run):
    launcher = PlayedLauncher(JobState.DONE)
    launcher.values = [{"first_step": 10, "num_steps": 10}]
    trained_to(run, 8)
    with pytest.raises(TrainError, match="trained to step 10, the newest checkpoint seen here is of step 8"):
        train(run, launcher)
    launcher.values = [{"first_step": 8, "num_steps": 10}]
    assert train(run, launcher) is None, "its checkpoint may be on its way"


def test_decisions_are_told_once(run, monkeypatch):
    """NaN equals nothing, not even itself."""
    monkeypatch.undo()
    launcher, lines, rounds, shown = PlayedLauncher(), [], [], []

    def consider(*_: object) -> None:
        rounds.append(1)
        if len(rounds) == 2:
            replan.spool_decision(run, run.config(), decision("stay"))
        if len(rounds) == 5:
            trained_to(run, 10)
            launcher.state = dict.fromkeys(launcher.state, JobState.DONE)

    async def show() -> None:
        shown.append(len(lines))

    replan.spool_decision(run, run.config(), decision("advised", at_s=1.0))  # long before this driver began
    monkeypatch.setattr(replan, "consider", consider)
    asyncio.run(train_once(run, launcher, str, Teller(run, lines.append, show)))
    told = [line for line in lines if "replan" in line]
    assert told == ["step 4: replan, layout: stay: "]
    assert len(shown) == 1


def test_the_rows_of_a_job_are_in_the_store_while_it_runs(run, monkeypatch):
    """Also where nobody plans anew."""
    monkeypatch.undo()
    launcher, seen = PlayedLauncher(), []

    async def round_ends() -> None:
        with Reader(run.config().store) as reader:
            seen.extend(reader.decisions(run.run_id))
        launcher.state = dict.fromkeys(launcher.state, JobState.DONE)

    config = run.config().model_copy(update={"replan": run.config().replan.model_copy(update={"mode": "off"})})
    Path(run.config_file).write_text(dump_config(config))
    teller = Teller(run, str, round_ends)
    replan.spool_decision(run, config, decision("noticed"))
    asyncio.run(train_once(run, launcher, str, teller))
    assert [d.verdict for d in seen] == ["noticed"]


@pytest.fixture
def doubtful(monkeypatch, tmp_path):
    """Something is, once."""
    doubts = [Reprofile(tmp_path / "1.json", "profile", "H200", (1, 2))]
    monkeypatch.setattr(reprofile, "doubtful", lambda *_: doubts.pop() if doubts else None)
    monkeypatch.setattr(replan, "consider", lambda *_: None)


class BusyLauncher(PlayedLauncher):
    """Probing jobs are in these states, one after the other."""

    def __init__(self, *states: JobState) -> None:
        super().__init__()
        self.states, self.names = list(states), []

    def submit(self, spec: JobSpec) -> JobHandle:
        handle = super().submit(spec)
        self.names.append(spec.name)
        if "reprofile" in spec.name:
            self.state[handle.job_id] = self.states.pop(0)
        return handle

    def end_training(self) -> None:
        self.state[next(iter(self.state))] = JobState.DONE


@pytest.mark.parametrize("second", [JobState.DONE, JobState.FAILED])
def test_doubtful_sizes_are_timed_beside_the_training_and_judged(make_run, doubtful, monkeypatch, second):
    run, launcher = make_run("cluster.num_cores_per_node=4"), BusyLauncher(JobState.DONE, second)
    run.write_plan(PLANS[0], [])
    judged: list[Reprofile] = []

    def settle(_run: RunDir, _config: object, work: Reprofile, _say: object) -> None:
        judged.append(work)
        launcher.end_training()

    monkeypatch.setattr(reprofile, "settle", settle)
    assert train(run, launcher) is None
    assert launcher.names == ["small-1-train", "small-1-reprofile-1-tp1", "small-1-reprofile-1-tp2"]
    assert [work.profile_key for work in judged] == ["profile"]


def test_a_probing_job_ends_with_the_training(make_run, doubtful, monkeypatch):
    run, launcher = make_run("cluster.num_cores_per_node=4"), BusyLauncher(JobState.RUNNING)
    run.write_plan(PLANS[0], [])
    monkeypatch.setattr(reprofile, "settle", lambda *_: pytest.fail("nothing was measured"))

    def consider(*_: object) -> None:
        if len(launcher.state) == 2:
            launcher.end_training()

    monkeypatch.setattr(replan, "consider", consider)
    assert train(run, launcher) is None
    assert sorted(launcher.state.values()) == [JobState.CANCELLED, JobState.DONE]


def test_nothing_is_timed_on_cores_that_train(run, doubtful):
    launcher = PlayedLauncher()
    assert not submit.has_place_beside(run.config(), run.plan()), "two cores, two ranks"
    rounds = Rounds(run, launcher, str, Teller(run, str, nobody))
    asyncio.run(rounds.round(submitted(run, launcher)))
    assert len(launcher.state) == 1
