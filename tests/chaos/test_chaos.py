"""The campaign itself: what is drawn, how an end is judged, and that the checks find what is wrong."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflop.jobs import runs
from dflop.launch import JobHandle, JobState, JobStatus, Journal
from dflop.records import StepObservation, StepPlan
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolWriter
from tests.chaos import __main__ as command
from tests.chaos import campaign, checks, dying, engine_faults, page
from tests.chaos.campaign import AGAIN, ITSELF, MENDED, Struck
from tests.chaos.fault import PARTS, End, Fault
from tests.chaos.moments import MOMENTS
from tests.chaos.play import Ended, Play
from tests.chaos.slurm_faults import FAULTS as SLURM_FAULTS
from tests.chaos.stage import REPO, Stage
from tests.jobs.configs import make_config

ALL = (*campaign.FAULTS, *(fault for fault in SLURM_FAULTS if fault.part == "slurm"))


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(Stage(tmp_path), random.Random(0), ("train", "chaos.yaml"))


def test_faults_have_names_of_their_own_and_strike_at_moments_there_are() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)
    assert {fault.part for fault in ALL} == set(PARTS)
    assert {fault.when for fault in ALL} <= MOMENTS.keys()
    assert {end.code for fault in ALL for end in fault.ends} <= checks.CODES | {-9}


@pytest.mark.parametrize("fault", [f for f in ALL if f.dies_at], ids=lambda f: f.name)
def test_places_to_die_at_are_there(fault: Fault) -> None:
    code = f"from tests.chaos.dying import arm; arm({fault.dies_at!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("when", "num_lines"), [("before", 1), ("behind", 2)])
def test_a_process_dies_at_the_call_that_it_was_told(when: str, num_lines: int) -> None:
    code = (
        "import tests.chaos.dying as d, types, sys\n"
        "spoken = types.ModuleType('spoken'); spoken.say = lambda n: print(n, flush=True)\n"
        f"sys.modules['spoken'] = spoken; d.arm('spoken:say:{when}:2')\n"
        "for n in range(3): spoken.say(n)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.splitlines()) == num_lines
    assert done.stderr == f"{dying.LAST_WORDS}spoken:say:{when}:2\n"


def test_a_place_that_is_misspelt_is_refused() -> None:
    with pytest.raises(ValueError, match="neither before nor behind"):
        dying.arm("json:dumps:during:1")
    with pytest.raises(AttributeError):
        dying.arm("json:nothing_of_the_kind:before:1")


def names(seed: int, number: int) -> list[tuple[str, float]]:
    return [(s.fault.name, s.roll) for s in campaign.draw(seed, number)[0]]


def test_a_run_can_be_drawn_again_and_half_as_many_runs_as_faults_meet_most() -> None:
    assert names(3, 7) == names(3, 7)
    assert names(3, 7) != names(4, 7)
    met = {name for number in range(50) for name, _ in names(0, number)}
    assert len(met) >= 0.9 * len(campaign.FAULTS)
    assert {len(names(0, number)) for number in range(50)} == {1, 2, 3}


def test_faults_that_exclude_one_another_are_not_drawn_together() -> None:
    for number in range(200):
        kinds = [s.fault.excludes for s in campaign.draw(1, number)[0] if s.fault.excludes]
        assert len(kinds) == len(set(kinds))
        mended = [s for s in campaign.draw(1, number)[0] if any(end.mend for end in s.fault.ends)]
        assert len(mended) <= 1


def test_an_end_is_that_of_the_fault_that_may_cause_it_and_is_mended_as_it_says(play: Play) -> None:
    mended: list[str] = []
    harmless = Struck(Fault("a", "store", "before", lambda _: None), 0.0, has_struck=True)
    killed = Struck(Fault("b", "engine", "before", lambda _: None, (End(5, "died"),)), 0.0, has_struck=True)
    damaged = Struck(
        Fault("c", "store", "before", lambda _: None, (End(4, "damaged", lambda _: mended.append("c")),)), 0.0
    )
    faults = [harmless, killed, damaged]
    assert campaign._explain(play, faults, Ended(5, "rank 1 died (signal 9)", 1.0))
    assert not campaign._explain(play, faults, Ended(4, "CURRENT is damaged", 1.0)), "it has not struck"
    damaged.has_struck = True
    assert campaign._explain(play, faults, Ended(4, "CURRENT is damaged", 1.0))
    assert not campaign._explain(play, faults, Ended(4, "another reason", 1.0))
    assert not campaign._explain(play, faults, Ended(1, "died", 1.0))
    assert mended == ["c"]
    assert [s.outcome for s in faults] == [campaign.NOT_STRUCK, AGAIN, MENDED]


def test_outputs_are_searched_for_tracebacks_and_unknown_codes(play: Play) -> None:
    play.ended = [Ended(0, "fine", 1.0), Ended(-9, "", 1.0), Ended(130, "", 1.0)]
    assert list(checks.of_outputs(play)) == []
    play.ended = [Ended(7, "", 1.0), Ended(1, "Traceback (most recent call last):\n  x\nKeyError: 'a'", 1.0)]
    first, second = checks.of_outputs(play)
    assert "ended with 7" in first
    assert "KeyError: 'a'" in second


def test_a_process_that_is_left_is_found_and_only_of_this_run(play: Play) -> None:
    other = Play(Stage(play.stage.folder / "other"), random.Random(0), ("train",))
    process = play.beside("-c", "import time; time.sleep(60)")
    try:
        (line,) = checks.of_processes(play, 0.1)
        assert f"process {process.pid} is left" in line
        assert list(checks.of_processes(other, 0.1)) == []
    finally:
        play.end_all()
    assert list(checks.of_processes(play, 0.1)) == []


def observation(step: int, rank: int, attempt: int = 1, loss: float = 1.0) -> StepObservation:
    return StepObservation(
        "small", attempt, step, "dflop", rank, "llm", 0, 0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, loss, 1.0, 10, 0.0, ()
    )


@pytest.fixture
def run(tmp_path: Path):
    """A run of two ranks that has made all its steps; `write` adds records to its store."""
    run, _ = runs.begin(make_config(tmp_path))
    seen = [observation(step, rank) for step in range(checks.NUM_STEPS) for rank in range(2)]

    class WithPlan:
        """All that is asked of a run and its plan."""

        path, run_id, config, num_processes = run.path, "small", run.config, 2

        def plan(self):
            return self

        def write(self, *records):
            with SpoolWriter(run.config().store, "small", "test") as spool:
                for record in records:
                    spool.append(record)

    found = WithPlan()
    found.write(*seen)
    return found


def test_steps_that_are_missing_or_there_twice_are_found(run) -> None:
    assert list(checks.of_steps(run)) == []
    run.write(observation(3, 1, attempt=2))
    assert list(checks.of_steps(run)) == [], "another start did it again"
    run.write(observation(3, 1))
    assert ["twice" in line for line in checks.of_steps(run)] == [True]


def test_losses_that_differ_are_found(run) -> None:
    expected = dict.fromkeys(range(checks.NUM_STEPS), 1.0)
    assert list(checks.of_losses(run, expected)) == []
    run.write(observation(3, 1, attempt=2, loss=1.01))
    assert ["step 3" in line for line in checks.of_losses(run, expected)] == [True]
    assert list(checks.of_losses(run, None)) == []
    run.write(observation(4, 1, attempt=2, loss=float("nan")))
    assert ["step 4" in line for line in checks.of_losses(run, None)] == [True]


def test_a_sample_that_an_epoch_lacks_is_found(tmp_path: Path) -> None:
    samples = set(range(16))

    def plans(store: Path, lost: int | None = None) -> list[str]:
        with SpoolWriter(store, "small", "scheduler") as spool:
            for step in range(checks.NUM_STEPS):
                batch = [i for i in range(8 * (step % 2), 8 * (step % 2) + 8) if not (step == 4 and i == lost)]
                spool.append(make_step_plan(step, batch))
        return list(checks._epochs(store, "small", samples))

    assert plans(tmp_path / "whole") == []
    assert plans(tmp_path / "lost", lost=3) == ["epoch 2: samples [3] are not trained exactly once"]


def make_step_plan(step: int, samples: list[int]) -> StepPlan:
    return StepPlan("small", step, "dflop", tuple(samples), 1, (), 10, 1.0, 1.0)


def test_entries_of_the_journal_that_the_store_has_twice_are_found(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run, _ = runs.begin(config)
    journal = Journal(run.path, run.run_id)
    handle = JobHandle("local", "1", "n", "key", run.path / "jobs" / "n", 1, 5.0)
    journal.submitted(handle)
    runs.spool_journal(run, config)
    ingest(config.store)
    assert ["is queued in the journal" in line for line in checks.of_jobs(run)] == [True]
    journal.changed(handle, JobStatus(JobState.DONE))
    runs.spool_journal(run, config)
    ingest(config.store)
    assert list(checks.of_jobs(run)) == []
    (run.path / "jobs.spooled").write_text("0")
    runs.spool_journal(run, config)
    ingest(config.store)
    assert list(checks.of_jobs(run)) == ["the store has 4 rows of 2 entries of the journal"]


def test_the_table_counts_runs_and_outcomes() -> None:
    faults = [{"part": "store", "name": "x", "outcome": ITSELF}, {"part": "data", "name": "y", "outcome": AGAIN}]
    content = {"backend": "local", "runs": [{"faults": faults}, {"faults": faults[:1]}]}
    (table,) = page.tables(json.loads(json.dumps(content))).values()
    assert "| store | x | 2 | 2 |  |  |  |  |" in table
    assert "| data | y | 1 |  | 1 |  |  |  |" in table
    assert "| all | 2 faults | 2 | 2 | 1 | 0 | 0 | 0 |" in table
    assert list(page.tables({"backend": "slurm", "runs": []})) == ["chaos-slurm"]


def test_faults_are_listed_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(campaign.FAULTS)
    with pytest.raises(SystemExit, match="no fault has `aliens`"):
        command.main(["--fault", "aliens"])


def test_a_campaign_goes_on_where_its_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []

    def play_run(folder, dataset, drawn, rng, number, losses, *, changes):
        played.append(number)
        if played == [0, 1]:
            raise KeyboardInterrupt
        return campaign.Result(number, "train", list(drawn))

    monkeypatch.setattr(command.stage, "make_dataset", lambda folder: None)
    monkeypatch.setattr(command.stage, "compile_kernels", lambda: None)
    monkeypatch.setattr(campaign, "undisturbed", lambda *_: {0: 1.0})
    monkeypatch.setattr(campaign, "play_run", play_run)
    file = tmp_path / "chaos.json"
    words = ["--runs", "3", "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        command.main(words)
    assert [run["number"] for run in json.loads(file.read_text())["runs"]] == [0]
    assert command.main(words) == 0
    assert played == [0, 1, 1, 2]
    assert [run["number"] for run in json.loads(file.read_text())["runs"]] == [0, 1, 2]
    with pytest.raises(SystemExit, match=r"has another campaign, .*'seed': 0"):
        command.main([*words, "--seed", "1"])


def test_a_signal_goes_to_a_process_and_not_to_its_forks(play: Play) -> None:
    code = "import os, time; marker = 'the-controller'; os.fork(); print(os.getpid(), flush=True); time.sleep(60)"
    process = play.beside("-c", code)
    try:
        deadline = time.monotonic() + 20
        while len(found := play.processes("the-controller")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert max(found) != process.pid, "the newest of that name is the fork"
        engine_faults.to_process("the-controller", signal.SIGKILL)(play)
        assert process.wait(20) == -signal.SIGKILL
    finally:
        play.end_all()
