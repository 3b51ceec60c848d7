"""What is done beside a training job: decisions told, rows brought in, doubtful sizes timed again. Jobs are played."""

from __future__ import annotations

import asyncio

import pytest

from dflop.launch import JobHandle, JobSpec, JobState
from dflop.run.directory import RunDir
from dflop.steps import replanning, reprofile, submit
from dflop.steps.continuing import train_once
from dflop.steps.reprofile import Reprofile
from dflop.steps.rounds import Rounds, Teller
from dflop.store.reader import Reader
from tests.jobs.made import save_step
from tests.jobs.played import PLANS, PlayedLauncher, decision, nobody, submitted, train

pytestmark = pytest.mark.usefixtures("untold")


def test_decisions_are_told_once(run, monkeypatch):
    """NaN equals nothing, not even itself."""
    monkeypatch.undo()
    launcher, lines, rounds, shown = PlayedLauncher(), [], [], []

    def consider(*_: object) -> None:
        rounds.append(1)
        if len(rounds) == 1:
            replanning.spool_decision(run, run.config(), decision("stay"))
        if len(rounds) == 3:
            save_step(run, 10)
            launcher.state = dict.fromkeys(launcher.state, JobState.DONE)

    async def show() -> None:
        shown.append(len(lines))

    replanning.spool_decision(run, run.config(), decision("advised", at_s=1.0))  # long before this driver began
    monkeypatch.setattr(replanning, "consider", consider)
    asyncio.run(train_once(run, launcher, str, Teller(run, lines.append, show)))
    told = [line for line in lines if "replan" in line]
    assert told == ["step 4: replan, layout: stay: "]
    assert len(shown) == 1


def test_the_rows_of_a_job_are_in_the_store_while_it_runs(make_run, monkeypatch):
    """Also where nobody plans anew."""
    monkeypatch.undo()
    run, launcher, seen = make_run("replan.mode=off"), PlayedLauncher(), []

    async def round_ends() -> None:
        with Reader(run.config().store) as reader:
            seen.extend(reader.decisions(run.run_id))
        launcher.state = dict.fromkeys(launcher.state, JobState.DONE)

    run.write_plan(PLANS[0], [])
    replanning.spool_decision(run, run.config(), decision("noticed"))
    asyncio.run(train_once(run, launcher, str, Teller(run, str, round_ends)))
    assert [d.verdict for d in seen] == ["noticed"]


@pytest.fixture
def doubtful(monkeypatch, tmp_path):
    """Something is, once."""
    doubts = [Reprofile(tmp_path / "1.json", "profile", "H200", (1, 2))]
    monkeypatch.setattr(reprofile, "doubtful", lambda *_: doubts.pop() if doubts else None)
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

    monkeypatch.setattr(replanning, "consider", consider)
    assert train(run, launcher) is None
    assert sorted(launcher.state.values()) == [JobState.CANCELLED, JobState.DONE]


def test_nothing_is_timed_on_cores_that_train(run, doubtful):
    launcher = PlayedLauncher()
    assert not submit.has_place_beside(run.config(), run.plan()), "two cores, two ranks"
    rounds = Rounds(run, launcher, str, Teller(run, str, nobody))
    asyncio.run(rounds.round(submitted(run, launcher)))
    assert len(launcher.state) == 1
