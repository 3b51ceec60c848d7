"""Why a job ended: the words of tasks, of srun and of the batch script, whichever says most."""

import dataclasses
import os
import pickle
import time
from pathlib import Path

import pytest

from dflop.errors import InfrastructureError, LaunchError
from dflop.launch import JobHandle, JobState, JobStatus, log_paths
from dflop.launch.job import CHECKPOINTED
from dflop.launch.results import TaskResult, collect_values, result_path
from dflop.launch.slurm import explained, first_dead_task

FAILED = JobStatus(JobState.FAILED, "NonZeroExitCode")


@pytest.fixture
def handle(tmp_path: Path) -> JobHandle:
    return JobHandle("slurm", "7", "train", "k", tmp_path, 4, 0.0)


def say(handle: JobHandle, *lines: str, start: int = 1) -> None:
    with handle.path("batch.log").open("a") as file:
        file.write(f"dflop: start {start} of job 7 on node1\n" + "".join(f"{line}\n" for line in lines))


def fail(handle: JobHandle, rank: int, error: str) -> None:
    trace = f"Traceback (most recent call last):\n  File x\n{error}\n"
    result_path(handle, rank).write_bytes(pickle.dumps(("error", trace)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("srun: error: node2: task 3: Killed", "rank 3 died (signal 9) on node2"),
        ("srun: error: n-01: task 1: Out Of Memory", "rank 1 Out Of Memory on n-01"),
        ("srun: error: task 2 launch failed: Slurmd could not connect IO", "rank 2 was not launched (Slurmd could not"),
        ("srun: error: node1: tasks 0,2: Exited with exit code 3", "rank 0 Exited with exit code 3 on node1"),
    ],
)
def test_srun_names_the_rank_and_its_node(handle, line, reason):
    say(handle, line, "srun: error: node1: task 0: Exited with exit code 1")
    assert explained(handle, FAILED).state is JobState.FAILED
    assert explained(handle, FAILED).reason.startswith(reason)


def test_a_rank_that_was_told_before_it_could_listen_did_nothing_wrong(handle):
    say(handle, "srun: error: node1: task 1: User defined signal 2", "srun: error: node1: task 0: Terminated")
    assert explained(handle, FAILED) == (
        JobState.INTERRUPTED,
        f"{CHECKPOINTED}; it was stopped before it handled signals",
    )


def test_a_traceback_says_more_than_an_exit_code(handle):
    say(handle, "srun: error: node1: task 2: Exited with exit code 1")
    fail(handle, 2, "ValueError: no microbatch")
    fail(handle, 0, "RuntimeError: Connection closed by peer")
    assert explained(handle, FAILED) == (JobState.FAILED, "rank 2: ValueError: no microbatch")


def test_the_culprit_is_named_and_not_the_peer_that_failed_before_it(handle):
    fail(handle, 0, "RuntimeError: [pair.cc:538] Connection closed by peer [127.0.0.1]:5555")
    fail(handle, 1, "ValueError: the culprit")
    fail(handle, 2, "ValueError: a later one")
    for at_s, rank in enumerate((0, 1, 2)):
        os.utime(result_path(handle, rank), (at_s, at_s))
    with pytest.raises(LaunchError, match="rank 1 of 4 raised ValueError: the culprit"):
        collect_values(handle, FAILED)


def test_a_rank_that_was_killed_outweighs_what_its_peers_raised(handle):
    say(handle, "srun: error: node2: task 3: Killed")
    fail(handle, 0, "ValueError: where is rank 3")
    assert explained(handle, FAILED).reason == "rank 3 died (signal 9) on node2"


def test_only_the_last_start_counts(handle):
    say(handle, "srun: error: node2: task 3: Killed")
    say(handle, start=2)
    assert first_dead_task(handle) is None
    say(handle, "srun: error: node1: task 1: Exited with exit code 75", start=3)
    assert explained(handle, FAILED) == (JobState.INTERRUPTED, CHECKPOINTED)


def test_a_job_that_left_its_state_behind_was_interrupted_whatever_srun_says(handle):
    say(handle, "srun: error: node2: task 3: Killed", "srun: error: node1: task 0: Exited with exit code 75")
    handle.path("interrupted").write_text("this site does not requeue\n")
    found = explained(handle, FAILED)
    assert (found.state, found.reason) == (JobState.INTERRUPTED, f"{CHECKPOINTED}; this site does not requeue")


def test_a_script_that_never_began_asks_whether_its_node_sees_the_folder(handle):
    found = explained(handle, JobStatus(JobState.FAILED, "JobLaunchFailure on n4"))
    assert found.reason == (
        f"JobLaunchFailure on n4; it ended before its script began on n4: can n4 see {handle.folder}?"
    )
    with pytest.raises(LaunchError, match="can n4 see") as caught:
        collect_values(handle, found)
    assert caught.value.where == str(handle.folder)


@pytest.mark.parametrize("off_s", [-86400, -300, 300])
def test_results_count_whatever_the_clock_of_their_node_says(handle, off_s):
    """Lustre and GPFS take times from clients."""
    now_s = time.time()
    for rank in range(4):
        result_path(handle, rank).write_bytes(pickle.dumps(("success", rank)))
        os.utime(result_path(handle, rank), (now_s + off_s,) * 2)
    submitted = dataclasses.replace(handle, submitted_at_s=now_s)
    assert collect_values(submitted, JobStatus(JobState.DONE)) == [0, 1, 2, 3]


def test_where_tasks_never_began_the_script_has_the_word(handle):
    say(handle, "/x/job.sbatch: line 9: module: command not found", "dflop: a setup line failed: module load cuda")
    found = explained(handle, FAILED)
    assert found == (JobState.FAILED, "dflop: a setup line failed: module load cuda")
    with pytest.raises(LaunchError, match="command not found") as caught:
        collect_values(handle, found)
    assert caught.value.where == str(handle.path("batch.log"))


@pytest.mark.parametrize("state", [JobState.TIMEOUT, JobState.CANCELLED, JobState.NODE_FAIL, JobState.PREEMPTED])
def test_what_slurm_did_is_not_put_down_to_a_rank(handle, state):
    say(handle, "srun: error: node2: task 3: Killed")
    assert explained(handle, JobStatus(state, "why")) == (state, "why")


def test_a_lost_job_stays_lost_unless_it_left_a_word(handle):
    lost = JobStatus(JobState.LOST, "unknown")
    assert explained(handle, lost) == lost
    say(handle, "some line")
    assert explained(handle, lost) == lost
    fail(handle, 1, "ValueError: x")
    assert explained(handle, lost) == (JobState.FAILED, "rank 1: ValueError: x")


def test_a_node_that_failed_is_told_from_a_payload_that_did(handle):
    log_paths(handle, 0).stderr.write_text("last words\n")
    with pytest.raises(InfrastructureError, match="last words"):
        collect_values(handle, JobStatus(JobState.NODE_FAIL, "NodeDown"))


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("Traceback (most recent call last):\n  x\ndflop.errors.DataError: a\n  hint:  b\n", "a\n  hint:  b"),
        (
            "Traceback (most recent call last):\n  x\ndflop.errors.DataError: a\n\nDuring\n\n"
            "Traceback (most recent call last):\n  y\nKeyError: 1",
            "",
        ),
        ("Traceback (most recent call last):\n  x\nValueError: dflop.errors.DataError: a", ""),
    ],
)
def test_only_an_error_of_ours_that_ended_the_task_speaks_for_itself(trace, message):
    assert TaskResult(0, ok=False, value=None, trace=trace, finished_at_s=0.0).message == message
