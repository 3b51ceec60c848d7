import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dflop.config import SlurmConfig
from dflop.launch import JobHandle, JobState, JobStatus, Journal, Resources, adopt_or_submit_all, executor, log_paths
from dflop.launch.results import BATCH_LOG
from dflop.launch.slurm import SlurmLauncher
from tests.launch.helpers import end, make_spec, until
from tests.slurm.faults import processes

TWO_BY_TWO = Resources(num_nodes=2, tasks_per_node=2, time_limit_min=5)


def ask_slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_one_task_with_gpus_and_memory(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # as inside another job; sbatch refuses the pair
    monkeypatch.setenv("SLURM_TRES_PER_TASK", "cpu:7")
    resources = Resources(cpus_per_task=2, gpus_per_node=2, memory_bytes=2**30, time_limit_min=5, partition="low")
    handle = launcher.submit(make_spec(tmp_path / "job", "report", "hello", resources=resources))
    assert end(launcher, handle).state is JobState.DONE
    (seen,) = launcher.collect(handle)
    assert (seen["word"], seen["OMP_NUM_THREADS"], seen["CUDA_VISIBLE_DEVICES"]) == ("hello", "2", "0,1")
    shown = ask_slurm("scontrol", "-o", "show", "job", handle.job_id)
    for part in ("Partition=low", "Comment=dflop:test", "MinMemoryNode=1G", "CPUs/Task=2", "TimeLimit=00:05:00"):
        assert part in shown
    assert "rank 0 says hello" in log_paths(handle, 0).stdout.read_text()


@pytest.mark.parametrize("num_idle", [pytest.param(0, marks=pytest.mark.lane("slurm-heart")), 1])
def test_two_nodes_with_two_tasks_each(launcher, tmp_path, num_idle):
    resources, num_tasks = dataclasses.replace(TWO_BY_TWO, num_idle_slots=num_idle), 4 - num_idle
    spec = make_spec(tmp_path / "job", "report", "x", resources=resources, env={"GREETING": "it's $HOME"})
    handle = launcher.submit(spec)
    assert end(launcher, handle).state is JobState.DONE
    seen = launcher.collect(handle)
    places = [(s["RANK"], s["NODE_RANK"], s["LOCAL_RANK"]) for s in seen]
    assert places == [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1")][:num_tasks]
    assert [s["LOCAL_WORLD_SIZE"] for s in seen] == ["2", "2", *[str(2 - num_idle)] * (2 - num_idle)]
    assert seen[0]["hostname"] == seen[1]["hostname"] != seen[2]["hostname"] == seen[-1]["hostname"]
    assert {s["MASTER_ADDR"] for s in seen} == {seen[0]["hostname"]}
    assert len({s["MASTER_PORT"] for s in seen}) == 1
    assert {s["WORLD_SIZE"] for s in seen} == {str(num_tasks)}
    assert {s["GREETING"] for s in seen} == {"it's $HOME"}


def test_a_killed_slurmstepd_does_not_keep_the_job_in_the_queue(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "LOOKS_EVERY_S", 1)
    monkeypatch.setattr(executor, "ENDS_WITHIN_S", 3)
    gate = tmp_path / "gate"
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(gate), resources=TWO_BY_TWO))
    until(lambda: handle.path("3.pid").exists(), what="the tasks to begin")
    (stepd, *_) = processes(f"slurmstepd: [{handle.job_id}.0]")
    os.kill(stepd, signal.SIGKILL)
    gate.touch()
    assert end(launcher, handle).state is JobState.DONE
    until(lambda: handle.job_id not in ask_slurm("squeue", "-h", "-o", "%i"), what="the job to leave the queue")
    assert launcher.collect(handle) == ["seen"] * 4
    assert "but srun waits; it is killed" in handle.path(BATCH_LOG).read_text()


def test_an_element_that_is_cancelled_while_it_waits_is_not_lost(cluster, tmp_path):
    launcher = SlurmLauncher(run_id="test", site=SlurmConfig(max_jobs_at_once=1, poll_interval_s=0.2, lost_after_s=60))
    gate = str(tmp_path / "gate")
    handles = launcher.submit_all(
        [make_spec(tmp_path / "job", "wait_for", gate, name=f"w{n}", key=f"w{n}", array="w") for n in range(4)]
    )
    until(lambda: launcher.poll(handles[0]).state is JobState.RUNNING, what="the first element to run")
    until(lambda: launcher.poll(handles[3]) == (JobState.QUEUED, "JobArrayTaskLimit"), what="why the last one waits")
    ask_slurm("scancel", handles[2].job_id)
    assert end(launcher, handles[2]).state is JobState.CANCELLED
    Path(gate).touch()
    assert [end(launcher, h).state for h in handles] == [
        JobState.DONE, JobState.DONE, JobState.CANCELLED, JobState.DONE,
    ]  # fmt: skip


def test_every_task_is_told_to_stop_and_none_dies_of_it_before_it_listens(launcher, tmp_path):
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        spec = make_spec(folder / "job", "stop_when_told", str(folder), resources=TWO_BY_TWO, is_resumable=True)
        handle = launcher.submit(spec)
        until(lambda h=handle: launcher.poll(h).state is JobState.RUNNING, what="the job to run")
        if told_until_all_have(handle, folder, "started", launcher):
            break
        # Nobody can keep a signal from the first instructions of a task; its job was told to stop and has.
        assert end(launcher, handle).state is JobState.INTERRUPTED
    assert launcher.poll(handle).state is JobState.RUNNING
    (folder / "listen").touch()
    assert told_until_all_have(handle, folder, "listens", launcher)
    launcher.interrupt(handle)
    assert end(launcher, handle).state is JobState.INTERRUPTED
    launcher.interrupt(handle)
    assert ask_slurm("scontrol", "-o", "show", "job", handle.job_id).count("Restarts=0") == 1, "it was to make way"


def told_until_all_have(handle: JobHandle, folder: Path, what: str, launcher: SlurmLauncher) -> bool:
    """Under a hail of signals; False: the job ended of it."""

    def told_again() -> str | None:
        launcher.interrupt(handle)
        if len(list(folder.glob(f"{what}-*"))) == handle.num_tasks:
            return what
        return "ended" if launcher.poll(handle).state.is_final else None

    return until(told_again, what=f"tasks that have {what} under a hail of signals") == what


@pytest.mark.lane("slurm-heart")
@pytest.mark.parametrize("act", [SlurmLauncher.cancel, SlurmLauncher.interrupt])
def test_a_queued_job_that_is_cancelled_or_told_to_stop_leaves_the_queue(launcher, tmp_path, act):
    resources = Resources(extra={"hold": ""})
    handle = launcher.submit(make_spec(tmp_path / "job", "report", "x", resources=resources))
    until(lambda: launcher.poll(handle) == (JobState.QUEUED, "JobHeldUser"), what="the hold")
    act(launcher, handle)
    assert end(launcher, handle).state is JobState.CANCELLED
    act(launcher, handle)
    assert ask_slurm("squeue", "-h", "-j", handle.job_id) == ""
    launcher.interrupt(JobHandle("slurm", "4999999", "ghost", "k", tmp_path, 1, 0.0))


@pytest.mark.lane("slurm-heart")
def test_a_job_that_is_renamed_while_it_waits_and_runs_on_nodes_whose_clock_is_late_is_done(launcher, tmp_path):
    """As a person who sorts the queue does, or job_submit.lua; the file system takes times from clients."""
    gate, journal = tmp_path / "gate", Journal(tmp_path / "run", "test")
    late = '(while sleep 0.02; do touch -d -5min "$folder/$job"_*_result.pkl; done 2>/dev/null) &'
    resources = Resources(num_nodes=2, setup=(late,), extra={"hold": ""}, time_limit_min=5)
    spec = make_spec(tmp_path / "job", "wait_for", str(gate), resources=resources)
    (handle,) = adopt_or_submit_all(launcher, [spec], journal)
    changes = ("jobname=proj42-a", "comment=billed to proj42", "partition=low")
    ask_slurm("scontrol", "update", f"jobid={handle.job_id}", *changes)
    assert launcher.poll(handle).state is JobState.QUEUED
    ask_slurm("scontrol", "release", handle.job_id)
    until(lambda: handle.path("0.pid").exists(), what="the tasks to begin")
    ask_slurm("scontrol", "update", f"jobid={handle.job_id}", "jobname=b")
    another = SlurmLauncher(run_id="test", site=SlurmConfig(poll_interval_s=0.5, lost_after_s=0.1))
    assert adopt_or_submit_all(another, [spec], journal) == [handle], "another driver adopts it"
    assert another.poll(handle).state is JobState.RUNNING
    gate.touch()
    assert (end(launcher, handle).state, launcher.collect(handle)) == (JobState.DONE, ["seen"] * 2)
    assert [r.job_id for r in journal.records()] == [handle.job_id]


def test_a_job_that_was_lost_and_runs_is_ended_before_another_one_is_submitted(launcher, tmp_path):
    spec = make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate"), resources=Resources(time_limit_min=5))
    journal = Journal(tmp_path / "run", "test")
    (first,) = adopt_or_submit_all(launcher, [spec], journal)
    until(lambda: first.path("0.pid").exists(), what="the task to begin")
    journal.changes([(first, JobStatus(JobState.LOST, "unknown to squeue and sacct"))])
    (second,) = adopt_or_submit_all(launcher, [spec], journal)
    (tmp_path / "gate").touch()
    assert end(launcher, second).state is JobState.DONE
    shown = ask_slurm("squeue", "-h", "-t", "all", "-o", "%T", "-j", first.job_id)
    assert shown.startswith("CANCELLED"), "by scancel, though its own work would have ended, too"
    assert first.folder != second.folder


def test_a_job_slurm_never_heard_of_is_lost(launcher, tmp_path):
    handle = JobHandle("slurm", "4999999", "ghost", "k", tmp_path, 1, 0.0)
    assert launcher.poll(handle).state is JobState.QUEUED
    assert end(launcher, handle) == (JobState.LOST, "unknown to squeue and sacct")
