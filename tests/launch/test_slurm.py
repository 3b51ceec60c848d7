"""The Slurm launcher against a Slurm that is none (`fake_slurm.py`): batch scripts run, nobody needs root.

tests/slurm has the same on a real one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflop.errors import Interrupted, LaunchError
from dflop.launch import JobSpec, JobState, Journal, Resources, Site, log_paths, run_job, script, wait_all
from dflop.launch.adopt import adopt_or_submit_all
from dflop.launch.slurm import SlurmLauncher
from dflop.launch.watch import SlurmWatcher
from tests.launch import fake_slurm
from tests.launch.helpers import all_noted, end, make_spec, until

TWO = Resources(tasks_per_node=2, time_limit_min=5)
HELD = Resources(extra={"hold": ""})
"""Of jobs that only have to be in the queue."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the cluster's state; its clients are first on PATH."""
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{fake_slurm.install(folder)}:{os.environ['PATH']}")
    yield folder
    subprocess.run([folder / "bin" / "scancel", *os.listdir(folder / "jobs")], capture_output=True, check=True)


@pytest.fixture
def launcher(slurm: Path) -> SlurmLauncher:
    return make_launcher(slurm)


def make_launcher(slurm: Path, **site: object) -> SlurmLauncher:
    """Its watcher asks often, hence without a process each time."""
    launcher = SlurmLauncher(run_id="r1", site=Site(**site), results_timeout_s=5)
    launcher.watcher = SlurmWatcher(
        poll_interval_s=0.1, lost_after_s=1, command=lambda args: fake_slurm.answer(slurm, args)
    )
    return launcher


def shards(folder: Path, num: int, **fields: object) -> list[JobSpec]:
    return [
        make_spec(
            folder / "job", "report", str(number), name=f"r1-data-{number}", key=f"data/{number}", array="r1-data",
            **fields,
        )
        for number in range(num)
    ]  # fmt: skip


def calls(slurm: Path, client: str) -> list[dict]:
    path = slurm / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [call for line in lines if client in (call := json.loads(line))]


def test_one_job_returns_its_values_and_its_saved_script_does_the_same_by_hand(launcher, slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # as inside another job
    resources = dataclasses.replace(TWO, setup=('export GREETING="$GREETING and more"',))
    handle = launcher.submit(
        make_spec(tmp_path / "job", "report", "hello", resources=resources, env={"GREETING": "it's $HOME"})
    )
    assert end(launcher, handle).state is JobState.DONE
    seen = launcher.collect(handle)
    assert [(s["word"], s["RANK"], s["WORLD_SIZE"], s["GREETING"]) for s in seen] == [
        ("hello", "0", "2", "it's $HOME and more"),
        ("hello", "1", "2", "it's $HOME and more"),
    ]
    assert "rank 1 says hello" in log_paths(handle, 1).stdout.read_text()
    assert stat.S_IMODE(handle.folder.stat().st_mode) == 0o700
    (call,) = calls(slurm, "sbatch")
    assert "SLURM_CPUS_PER_TASK" not in call["environment"]
    saved = handle.folder / "job.sbatch"
    assert handle.path("job.sbatch").read_text() == saved.read_text()
    done = subprocess.run(["sbatch", "--parsable", saved], capture_output=True, text=True, check=True)
    by_hand = dataclasses.replace(handle, job_id=done.stdout.strip())
    assert end(launcher, by_hand).state is JobState.DONE
    assert launcher.collect(by_hand)[0]["word"] == "hello"


def test_jobs_alike_are_one_array_and_one_question(launcher, slurm, tmp_path):
    handles = launcher.submit_all(shards(tmp_path, 2))
    assert len(calls(slurm, "sbatch")) == 1
    assert {h.job_id.split("_")[0] for h in handles} == {handles[0].job_id.split("_")[0]}
    ends = asyncio.run(wait_all(launcher, handles, poll_interval_s=0.05))
    assert {s.state for s in ends} == {JobState.DONE}
    assert [launcher.collect(h)[0]["word"] for h in handles] == ["0", "1"]


def test_parts_of_an_array_wait_for_each_other_where_few_may_run_at_once(slurm, tmp_path):
    (slurm / "max_array_size").write_text("2")
    make_launcher(slurm, max_jobs_at_once=1).submit_all(shards(tmp_path, 4, resources=HELD))
    first, second = calls(slurm, "sbatch")
    assert not any("dependency" in arg for arg in first["sbatch"])
    assert "--dependency=afterany:101" in second["sbatch"]
    assert "#SBATCH --array=0-1%1" in (tmp_path / "job" / "job-2.sbatch").read_text()


def test_a_part_that_is_refused_takes_back_those_before_it(slurm, launcher, tmp_path):
    good = make_spec(tmp_path / "good", "report", "x", resources=HELD)
    bad = make_spec(tmp_path / "bad", "report", "x", resources=Resources(partition="nowhere"))
    with pytest.raises(LaunchError, match="invalid partition specified: nowhere") as caught:
        launcher.submit_all([good, bad])
    assert caught.value.where == str(tmp_path / "bad" / "job.sbatch")
    with fake_slurm.Jobs(slurm) as jobs:
        (job,) = jobs.values()
    assert job["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("entry", "reason", "said"),
    [
        ("fail_on", "rank 1: ValueError: no microbatch for rank 1", "rank 1 of 2 raised ValueError"),
        ("leave_on", "rank 1 Exited with exit code 3 on localhost", r"\n  \| rank 0 does not answer"),
    ],
)
def test_the_rank_that_failed_is_told_with_its_log(launcher, tmp_path, entry, reason, said):
    handle = launcher.submit(make_spec(tmp_path / "job", entry, "1", resources=TWO))
    assert end(launcher, handle) == (JobState.FAILED, reason)
    with pytest.raises(LaunchError, match=said) as caught:
        launcher.collect(handle)
    assert caught.value.where == str(log_paths(handle, 1).stderr)


def test_a_setup_line_that_fails_ends_the_job_and_is_named(launcher, tmp_path):
    resources = Resources(setup=("export GREETING=hi", "no-such-command --load", "export GREETING=ho"))
    handle = launcher.submit(make_spec(tmp_path / "job", "report", "x", resources=resources))
    assert end(launcher, handle).reason == "dflop: a setup line of the cluster file failed: no-such-command --load"
    with pytest.raises(LaunchError, match="command not found"):
        launcher.collect(handle)


def test_a_job_goes_on_under_its_id_until_it_is_done(launcher, slurm, tmp_path):
    spec = make_spec(tmp_path / "job", "work_on", str(tmp_path), "20", "10", is_resumable=True)
    seen: list[str] = []
    journal = Journal(tmp_path / "run", "r1")
    assert run_job(launcher, spec, journal, on_state=lambda _, s: seen.append(str(s)), poll_interval_s=0.02) == [20]
    (job_id,) = {r.job_id for r in journal.records()}
    assert len(calls(slurm, "sbatch")) == 1
    assert (tmp_path / "job" / f"{job_id}_stops").read_text() == "0 10\n10 20\n"
    assert (tmp_path / "job" / f"{job_id}_batch.log").read_text().count("dflop: start ") == 3
    assert seen[-1] == "done"


@pytest.mark.parametrize("before", ["", "0 0\n0 0\n0 5\n"])
def test_a_job_that_gets_nowhere_is_started_three_times(launcher, tmp_path, before):
    """Two starts that got nowhere and one that did do not count."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "101_stops").write_text(before)
    handle = launcher.submit(make_spec(tmp_path / "job", "work_on", str(tmp_path), "30", "0", is_resumable=True))
    assert handle.job_id == "101"
    found = end(launcher, handle)
    assert found.state is JobState.INTERRUPTED
    assert "stopped 3 times before it got anywhere" in found.reason
    assert handle.path("stops").read_text() == before + "0 0\n" * 3
    with pytest.raises(Interrupted):
        launcher.collect(handle)


def test_where_nothing_is_requeued_the_driver_is_told(launcher, slurm, tmp_path):
    (slurm / "no_requeue").touch()
    spec = make_spec(tmp_path / "job", "work_on", str(tmp_path), "10", "10", is_resumable=True)
    journal = Journal(tmp_path / "run", "r1")
    with pytest.raises(Interrupted, match="its state is on disk"):
        run_job(launcher, spec, journal, poll_interval_s=0.02)
    assert run_job(launcher, spec, journal, poll_interval_s=0.02) == [10]
    assert len(calls(slurm, "sbatch")) == 2


def test_a_job_that_is_to_make_way_is_not_started_again(launcher, tmp_path):
    (tmp_path / "listen").touch()
    spec = make_spec(tmp_path / "job", "stop_when_told", str(tmp_path), resources=TWO, is_resumable=True)
    handle = launcher.submit(spec)
    all_noted(tmp_path, "listens", 2)
    launcher.interrupt(handle)
    found = end(launcher, handle)
    assert (found.state, "make way" in found.reason) == (JobState.INTERRUPTED, True)
    assert handle.path("batch.log").read_text().count("dflop: start ") == 1
    launcher.interrupt(handle)


def test_ranks_that_leave_one_after_another_are_no_failure(launcher, tmp_path):
    """srun's exit code is 137 then: the first to leave has the others killed."""
    (tmp_path / "listen").touch()
    spec = make_spec(
        tmp_path / "job", "stop_when_told", str(tmp_path), "once", resources=Resources(tasks_per_node=3),
        is_resumable=True,
    )  # fmt: skip
    handle = launcher.submit(spec)
    all_noted(tmp_path, "listens", 3)
    subprocess.run(["scancel", "--signal=USR2", handle.job_id], check=True)
    assert end(launcher, handle).state is JobState.DONE
    assert launcher.collect(handle) == ["went on"] * 3
    assert handle.path("batch.log").read_text().count("dflop: start ") == 2


def test_tracebacks_of_a_start_before_do_not_end_a_job_that_runs_again(launcher, slurm, tmp_path):
    """A node died: the ranks on the others raised, and Slurm started the job again."""
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate")))
    until(lambda: launcher.poll(handle).state is JobState.RUNNING, what="the job to run")
    handle.path("0_result.pkl").write_bytes(pickle.dumps(("error", "ValueError: my peer is gone")))
    assert launcher.poll(handle).state is JobState.RUNNING
    (tmp_path / "gate").touch()
    assert end(launcher, handle).state is JobState.DONE


def test_cancelling_many_is_one_command_and_ended_ones_are_no_error(launcher, slurm, tmp_path):
    never = str(tmp_path / "never")
    handles = launcher.submit_all(
        [make_spec(tmp_path / "job", "wait_for", never, name=f"w{n}", key=f"w{n}", array="w") for n in range(2)]
    )
    launcher.cancel(*handles)
    launcher.cancel(*handles)
    launcher.cancel()
    assert {s.state for s in launcher.poll_all(handles)} == {JobState.CANCELLED}
    with pytest.raises(LaunchError, match="cancelled"):
        launcher.collect(handles[0])


def test_a_queue_that_is_silent_is_said_and_nothing_is_lost(launcher, slurm, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate")))
    until(lambda: launcher.poll(handle).state is JobState.RUNNING, what="the job to run")
    (slurm / "down").touch()
    until(lambda: "squeue has not answered since" in launcher.poll(handle).reason, what="silence to be said")
    assert launcher.poll(handle).state is JobState.RUNNING
    (tmp_path / "gate").touch()
    assert end(launcher, handle).state is JobState.DONE, "results speak for themselves"


def test_jobs_that_were_submitted_and_never_noted_are_adopted(launcher, slurm, tmp_path):
    """Their driver died in between; of an array, those are adopted that are still in the queue."""
    specs = [
        make_spec(
            tmp_path / "job", "wait_for", str(tmp_path / name), name=f"r1-{name}", key=name, array="r1", resources=TWO
        )
        for name in ("a", "b", "c")
    ]  # fmt: skip
    strays = launcher.submit_all(specs)
    (tmp_path / "b").touch()
    end(launcher, strays[1])
    journal, later = Journal(tmp_path / "run", "r1"), make_launcher(slurm)
    until(lambda: len(later.strays(specs, set())) == 2, what="the queue to know of its end")
    handles = adopt_or_submit_all(later, specs, journal)
    assert [h.job_id == stray.job_id for h, stray in zip(handles, strays, strict=True)] == [True, False, True]
    assert [(h.name, h.key, h.num_tasks, h.folder) for h in handles] == [
        (s.name, s.key, s.num_tasks, s.folder) for s in strays
    ]
    assert {r.job_id for r in journal.records()} == {h.job_id for h in handles}
    assert later.strays(specs, {h.job_id for h in handles}) == []
    for name in ("a", "c"):
        (tmp_path / name).touch()
    assert {end(later, handle).state for handle in handles} == {JobState.DONE}


def test_strays_are_asked_for_only_where_something_was_submitted(launcher, slurm, tmp_path):
    specs = shards(tmp_path, 2, resources=HELD)
    assert launcher.strays(specs, set()) == []
    assert calls(slurm, "squeue") == []
    launcher.submit_all(specs)
    (slurm / "down").touch()
    with pytest.raises(LaunchError, match="cannot tell whether job `r1-data-0` was submitted before: slurm_load_jobs"):
        launcher.strays(specs, set())


def test_a_job_whose_srun_is_not_told_of_the_end_leaves_the_queue(launcher, slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "LOOKS_EVERY_S", 0.2)
    monkeypatch.setattr(script, "ENDS_WITHIN_S", 1.5)
    (slurm / "srun_is_not_told").touch()
    spec = make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate"), resources=TWO)
    handle = launcher.submit(spec)

    def is_queued() -> bool:
        return bool(fake_slurm.answer(slurm, ["squeue"]).stdout)

    time.sleep(2.5)
    assert is_queued(), "nothing is over before the results are there"
    (tmp_path / "gate").touch()
    assert end(launcher, handle).state is JobState.DONE
    assert is_queued(), "tasks have time to end"
    until(lambda: not is_queued(), what="the queue to be empty")
    assert launcher.collect(handle) == ["seen"] * 2
    assert "all tasks left their results 1.5 s ago, but srun waits" in handle.path(script.BATCH_LOG).read_text()
