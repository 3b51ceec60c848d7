"""A training job and what is done while it runs: decisions, rows, sizes timed again. Jobs are played."""

import asyncio
import os
from pathlib import Path

import pytest

from dflop.errors import Interrupted, LaunchError, TrainError
from dflop.launch import JobHandle, JobSpec, JobState
from dflop.learn.remeasure import Doubt, write_doubts
from dflop.records import LLM
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.training_claim import TrainingClaim
from dflop.steps import replanning, submit, training
from dflop.steps.follow import Listener
from dflop.steps.next_plan import next_plan
from dflop.steps.replanning import Advice
from dflop.store.lease import Claim
from dflop.store.reader import Reader
from tests.builders import make_table
from tests.jobs.made import save_step
from tests.jobs.played import PLANS, PlayedLauncher, advice, decision, decisions, submitted, train

pytestmark = pytest.mark.usefixtures("untold")


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
    [(JobState.INTERRUPTED, "", Interrupted), (JobState.FAILED, "done", LaunchError), (JobState.DONE, "done", None)],
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
    assert not run.is_replanning()
    (told,) = decisions(run)
    assert (told.kind, told.verdict) == ("replan", "failed")
    assert told.detail.startswith("training ended first")


def test_a_job_that_has_nothing_to_do_is_not_started_for_ever(run):
    launcher = PlayedLauncher(JobState.DONE)
    launcher.values = [{"first_step": 10, "num_steps": 10}]
    save_step(run, 8)
    with pytest.raises(TrainError, match="trained 10 steps, the newest checkpoint seen here has 8"):
        train(run, launcher)
    launcher.values = [{"first_step": 8, "num_steps": 10}]
    assert train(run, launcher) is None, "its checkpoint may be on its way"


def test_a_job_that_slurm_told_to_stop_has_trained_so_far_if_it_got_on(make_run, monkeypatch):
    run, launcher = make_run(), PlayedLauncher(JobState.INTERRUPTED)
    run.write_plan(PLANS[0], [])
    save_step(run, 3)
    slurm = run.config().model_copy(update={"cluster": run.config().cluster.model_copy(update={"backend": "slurm"})})
    monkeypatch.setattr(RunDir, "config", lambda _: slurm)
    with pytest.raises(Interrupted):
        train(run, launcher)
    collect, lines = launcher.collect, []

    def got_on(handle: JobHandle) -> list[dict[str, int]]:
        save_step(run, 5)
        return collect(handle)

    monkeypatch.setattr(launcher, "collect", got_on)
    found = asyncio.run(training.train(run, launcher, Listener(lines.append)))
    assert found == training.Trained(5, is_over=False)
    assert lines[-1].endswith("resuming from step 5 in another job")


def test_processes_that_train_without_a_launcher_are_waited_for_and_nothing_is_submitted_or_planned(run, monkeypatch):
    launcher, lines, claim = PlayedLauncher(JobState.DONE), [], TrainingClaim(run, TRAIN, print)
    (run.path / "replanning").touch()
    assert next_plan(run, launcher, None, str) == (run.plan(),)
    assert run.is_replanning(), "what trains has that plan"
    run.mark_replanning(False)
    sleep = asyncio.sleep

    async def ends(seconds: float) -> None:
        if seconds == training.POLL_S and len(lines) == 1 and not launcher.state:
            save_step(run, 10)
            claim.release()
        await sleep(0)

    monkeypatch.setattr(training.asyncio, "sleep", ends)
    asyncio.run(training.train(run, launcher, Listener(lines.append)))
    assert lines[0].startswith(f"run {run.run_id} is being trained by process {os.getpid()} on ")
    assert lines[0].endswith("; waiting for it")
    assert len(launcher.state) == 1, "afterwards a job finds nothing left"


def test_a_drivers_job_that_ended_because_another_one_trains_is_succeeded_by_that_one(run, monkeypatch):
    lines, claim, calls = [], TrainingClaim(run, TRAIN, print), []

    async def follow(*_args: object, **_options: object) -> list[list[dict[str, int]]]:
        calls.append(1)
        if len(calls) < 3:
            raise LaunchError("job `train` failed: the run is being trained by job 12\nmore")
        save_step(run, 10)
        claim.release()
        return [[{"first_step": 0, "num_steps": 10}]]

    monkeypatch.setattr(training, "follow_jobs", follow)
    monkeypatch.setattr(training, "live_job", lambda *_: "the one that trains")
    assert asyncio.run(training.train(run, PlayedLauncher(), Listener(lines.append))).is_over
    told = "job `train` failed: the run is being trained by job 12; following the job that trains"
    assert (len(calls), lines) == (3, [told, told])


def test_what_is_left_of_a_failed_job_is_not_followed(run, monkeypatch):
    """A rank was killed: rank 0 holds its claim until it ends, a moment after its launcher has seen the end."""
    launcher = PlayedLauncher(JobState.FAILED)

    def holder(*_: object) -> Claim | None:
        return next(
            (Claim(1, "here", "2026-11-20T12:00:00Z", job=f"played {number}") for number in launcher.state), None
        )

    monkeypatch.setattr(training, "trainer_of", holder)
    with pytest.raises(LaunchError, match="the job is failed"):
        asyncio.run(asyncio.wait_for(training.train(run, launcher, Listener(print)), 30))
    assert len(launcher.state) == 1


def test_decisions_are_told_once(run, monkeypatch):
    """NaN equals nothing, not even itself."""
    monkeypatch.undo()
    launcher, lines, rounds = PlayedLauncher(), [], []

    def consider(*_: object) -> None:
        rounds.append(1)
        if len(rounds) == 1:
            replanning.spool_decision(run, run.config(), decision("stay"))
        if len(rounds) == 3:
            save_step(run, 10)
            launcher.state = dict.fromkeys(launcher.state, JobState.DONE)

    replanning.spool_decision(run, run.config(), decision("advised", at_s=1.0))  # long before this driver began
    monkeypatch.setattr(replanning, "consider", consider)
    train(run, launcher, lines.append)
    assert [line for line in lines if "replan" in line] == ["step 3: replan, layout: stay: "]


def test_the_rows_of_a_job_are_in_the_store_while_it_runs(make_run, monkeypatch):
    """Also where nobody plans anew."""
    monkeypatch.undo()
    run, launcher, seen = make_run("replan.mode=off"), PlayedLauncher(), []

    def look(*_: object) -> None:
        with Reader(run.config().store) as reader:
            seen.extend(reader.decisions(run.run_id))
        launcher.state = dict.fromkeys(launcher.state, JobState.DONE)

    run.write_plan(PLANS[0], [])
    replanning.spool_decision(run, run.config(), decision("noticed"))
    monkeypatch.setattr(replanning, "consider", look)
    train(run, launcher)
    assert {d.verdict for d in seen} == {"noticed"}


@pytest.fixture
def doubtful(monkeypatch, tmp_path):
    """Something is, once, at two degrees."""
    doubts = [write_doubts(RunDir(tmp_path), [Doubt(LLM, tp, False, False, ((0, 9),), 2.0) for tp in (2, 1, 2)])]
    monkeypatch.setattr(training, "doubtful", lambda *_: doubts.pop() if doubts else None)
    monkeypatch.setattr(replanning, "consider", lambda *_: None)


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
    run.write_plan(PLANS[0], [make_table(LLM)])
    judged: list[str] = []

    def settle(_run: RunDir, _config: object, doubts: Path, _say: object) -> None:
        judged.append(doubts.name)
        launcher.end_training()

    monkeypatch.setattr(training, "settle", settle)
    assert train(run, launcher) is None
    assert launcher.names == ["small-1-train", "small-1-reprofile-1-tp1", "small-1-reprofile-1-tp2"]
    assert judged == ["1.json"]


def test_a_probing_job_ends_with_the_training(make_run, doubtful, monkeypatch):
    run, launcher = make_run("cluster.num_cores_per_node=4"), BusyLauncher(JobState.RUNNING)
    run.write_plan(PLANS[0], [make_table(LLM)])
    monkeypatch.setattr(training, "settle", lambda *_: pytest.fail("nothing was measured"))

    def consider(*_: object) -> None:
        if len(launcher.state) == 2:
            launcher.end_training()

    monkeypatch.setattr(replanning, "consider", consider)
    assert train(run, launcher) is None
    assert sorted(launcher.state.values()) == [JobState.CANCELLED, JobState.DONE]


def test_nothing_is_timed_on_cores_that_train(run, doubtful):
    launcher = PlayedLauncher()
    assert not submit.has_place_beside(run.config(), run.plan()), "two cores, two ranks"
    rounds = training._Rounds(run, launcher, Listener(str))
    asyncio.run(rounds.round(submitted(run, launcher)))
    assert len(launcher.state) == 1
