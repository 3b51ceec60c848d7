import json
import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop.errors import Interrupted, LaunchError, PayloadError
from dflop.launch import JobHandle, JobState, Journal, Resources, log_paths
from dflop.launch.controller import watch
from dflop.launch.local import LocalLauncher
from dflop.launch.process import kill_all
from tests.launch.helpers import all_noted, end, is_gone, make_spec, pids_of_hang, run_job, until

BOTH_WAYS = pytest.mark.parametrize("num_gpus", [1, 0], ids=["an import each", "one import"])


@pytest.fixture
def launcher() -> LocalLauncher:
    return LocalLauncher(cancel_grace_s=0.5)


@BOTH_WAYS
def test_every_task_learns_its_rank_and_leaves_its_log(launcher, tmp_path, monkeypatch, num_gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    resources = Resources(num_nodes=2, tasks_per_node=1, cpus_per_task=2, gpus_per_node=num_gpus)
    spec = make_spec(tmp_path / "job", "report", "x", resources=resources, env={"GREETING": "it's me"})
    handle = launcher.submit(spec)
    assert end(launcher, handle).state is JobState.DONE
    seen = launcher.collect(handle)
    assert [s["RANK"] for s in seen] == ["0", "1"]
    assert [s["LOCAL_RANK"] for s in seen] == ["0", "1"], "two nodes on one machine are one node"
    assert {s["WORLD_SIZE"] for s in seen} == {s["LOCAL_WORLD_SIZE"] for s in seen} == {"2"}
    assert {(s["MASTER_ADDR"], s["NODE_RANK"], s["OMP_NUM_THREADS"]) for s in seen} == {("127.0.0.1", "0", "2")}
    assert len({s["MASTER_PORT"] for s in seen}) == 1
    assert {(s["CUDA_VISIBLE_DEVICES"], s["GREETING"], s["word"]) for s in seen} == {("3,5", "it's me", "x")}
    for rank in range(2):
        assert f"rank {rank} says x" in log_paths(handle, rank).stdout.read_text()
    assert stat.S_IMODE(handle.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("rank", [0, 1])
def test_the_traceback_of_the_failing_rank_is_shown_and_not_repeated_to_who_follows_the_log(
    launcher: LocalLauncher, tmp_path: Path, rank: int
) -> None:
    lines: list[str] = []
    journal = Journal(tmp_path / "run", "r1")
    spec = make_spec(tmp_path / "job", "fail_on", str(rank), num_tasks=2)
    with pytest.raises(
        LaunchError, match=f"rank {rank} of 2 raised ValueError: no microbatch for rank {rank}"
    ) as caught:
        run_job(launcher, spec, journal, on_log_line=lambda _, line: lines.append(line))
    assert "entries.py" in caught.value.what, "the traceback itself"
    assert set(lines) <= {"the task was stopped from outside"}
    (handle,) = {record.job_id for record in journal.records()}
    assert caught.value.where == str(tmp_path / "job" / f"{handle}_{rank}_log.err")
    assert journal.records()[-1].reason == f"rank {rank}: ValueError: no microbatch for rank {rank}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_task_that_exits_without_a_result_fails_the_job_and_its_log_is_shown(launcher, tmp_path, rank):
    spec = make_spec(tmp_path / "job", "leave_on", str(rank), num_tasks=2)
    handle = launcher.submit(spec)
    assert end(launcher, handle) == (JobState.FAILED, f"rank {rank} exited with code 3 and no traceback")
    with pytest.raises(LaunchError, match=r"exited with code 3 .*\n  \| rank 0 does not answer") as caught:
        launcher.collect(handle)
    assert caught.value.where == str(log_paths(handle, rank).stderr)


def test_a_job_that_stopped_with_a_checkpoint_was_interrupted_and_starts_anew(launcher, tmp_path):
    spec, journal = make_spec(tmp_path / "job", "stop"), Journal(tmp_path / "run", "r1")
    for num_jobs in (1, 2):
        with pytest.raises(Interrupted, match="was stopped") as caught:
            run_job(launcher, spec, journal)
        assert caught.value.exit_code == 75
        assert len({r.job_id for r in journal.records()}) == num_jobs
        assert journal.records()[-1].state == "interrupted"


@pytest.mark.parametrize("setup", [(), ("export GREETING=hi",)])
def test_every_task_is_told_to_stop_and_does_once_it_listens(launcher, tmp_path, setup):
    resources = Resources(tasks_per_node=2, setup=setup)
    spec = make_spec(tmp_path / "job", "stop_when_told", str(tmp_path), resources=resources)
    handle = launcher.submit(spec)
    all_noted(tmp_path, "started", 2)
    LocalLauncher().interrupt(handle)
    assert launcher.poll(handle).state is JobState.RUNNING
    (tmp_path / "listen").touch()
    assert end(launcher, handle).state is JobState.INTERRUPTED
    launcher.interrupt(handle)
    assert launcher.poll(handle).state is JobState.INTERRUPTED


@BOTH_WAYS
def test_a_killed_rank_ends_the_job_and_its_peers(launcher, tmp_path, num_gpus):
    resources = Resources(tasks_per_node=2, gpus_per_node=num_gpus)
    handle = launcher.submit(make_spec(tmp_path / "job", "hang", str(tmp_path), resources=resources))
    pids = [pids_of_hang(tmp_path, rank) for rank in range(2)]
    assert launcher.poll(handle).state is JobState.RUNNING
    os.kill(pids[1][0], signal.SIGKILL)
    assert end(launcher, handle) == (JobState.FAILED, "rank 1 died (signal 9)")
    assert all(is_gone(pid) for task in pids for pid in task)
    with pytest.raises(LaunchError, match=r"rank 1 died \(signal 9\)") as caught:
        launcher.collect(handle)
    assert caught.value.exit_code == LaunchError.exit_code == 5, "no fault of the payload"


@pytest.mark.parametrize(("codes", "dead_rank"), [([1, -9, 1], 1), ([0, 1, 1], 1)])
def test_of_tasks_seen_dead_at_once_the_killed_one_is_the_cause(codes, dead_rank):
    tasks = [SimpleNamespace(wait=lambda _, code=code: code) for code in codes]
    assert watch(tasks, 60, 10) == {"dead": (dead_rank, codes[dead_rank]), "timed_out": False}


def test_a_killed_controller_leaves_no_task_behind(launcher, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "hang", str(tmp_path)))
    pids = pids_of_hang(tmp_path, 0)
    os.kill(json.loads(handle.path("process.json").read_text())["pid"], signal.SIGKILL)
    assert end(launcher, handle) == (JobState.FAILED, "killed: its controller died before its tasks ended")
    assert all(is_gone(pid) for pid in pids), "the child has a session of its own"


def test_cancel_ends_tasks_and_their_children(launcher, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "hang", str(tmp_path), num_tasks=2))
    pids = [pid for rank in range(2) for pid in pids_of_hang(tmp_path, rank)]
    launcher.cancel(handle)
    assert launcher.poll(handle).state is JobState.CANCELLED
    assert all(is_gone(pid) for pid in pids)
    launcher.cancel(handle)
    with pytest.raises(LaunchError, match="cancelled"):
        launcher.collect(handle)


def test_all_are_stopped_before_the_first_is_killed():
    """A rank that sees its peer go may have nothing left to wait for, and end as if all were well."""
    sent: list[int] = []
    kill_all([SimpleNamespace(send_signal=sent.append, is_running=lambda: False)] * 3)
    assert sent == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3


def test_a_job_past_its_time_limit_is_ended(launcher, tmp_path):
    spec = make_spec(tmp_path / "job", "hang", str(tmp_path), resources=Resources(time_limit_min=0))
    assert end(launcher, launcher.submit(spec)).state is JobState.TIMEOUT


def test_nothing_of_a_flows_server_goes_to_a_job(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:secret")
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(tmp_path / "never")))
    task = until(lambda: handle.read("0.pid"), what="the task").split()[0].decode()
    assert b"PREFECT_" not in Path("/proc", task, "environ").read_bytes()
    launcher.cancel(handle)


def test_a_reused_pid_is_not_taken_for_the_job(launcher, tmp_path):
    (tmp_path / "j_process.json").write_text(json.dumps({"pid": os.getpid()}))
    handle = JobHandle("local", "j", "job", "key", tmp_path, 1, 0.0)
    assert launcher.poll(handle).state is JobState.FAILED
    launcher.cancel(handle)  # must not end this test


def test_an_error_of_ours_is_shown_without_its_traceback_and_is_no_fault_of_the_machine(launcher, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "fail_with_hint"))
    assert end(launcher, handle).state is JobState.FAILED
    with pytest.raises(PayloadError) as caught:
        launcher.collect(handle)
    assert caught.value.exit_code == 1
    text = str(caught.value)
    assert "Traceback" not in text
    assert " raised: a disk is missing\n  where: here\n  hint:  buy one" in text


@pytest.mark.parametrize(
    ("entry", "named"),
    [("no_colon", "no_colon"), ("tests.launch.entries:absent", "absent"), ("tests.launch.nowhere:run", "nowhere")],
)
def test_an_entry_that_does_not_exist_is_named(launcher, entry, named, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "report", entry=entry, num_tasks=2))
    assert end(launcher, handle).state is JobState.FAILED
    with pytest.raises(LaunchError, match=f"(raised|No module).*{named}"):
        launcher.collect(handle)
