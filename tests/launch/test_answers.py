"""What Slurm's clients print, read; the lines are of Slurm 22.05 unless another version is named."""

from __future__ import annotations

import os
import pwd
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.launch import JobState
from dflop.launch.answers import STATES, expand, sacct_rows, scontrol_rows, squeue_rows, status_of

NOON_S = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("job_id", "jobs"),
    [
        ("123", ("123",)),
        ("123_[0-8:4]", ("123_0", "123_4", "123_8")),
        ("123_[]", ("123",)),
        ("het+1", ("het+1",)),
    ],
)
def test_elements_that_share_a_line_are_told_apart(job_id, jobs):
    assert expand(job_id) == jobs


@given(st.sets(st.integers(0, 40), min_size=1))
def test_any_compressed_list_is_read(elements):
    """As Slurm compresses it: runs of neighbours are ranges."""
    ranges, ordered = [], sorted(elements)
    for element in ordered:
        if ranges and ranges[-1][1] == element - 1:
            ranges[-1][1] = element
        else:
            ranges.append([element, element])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    assert expand(f"9_[{text}%3]") == tuple(f"9_{element}" for element in ordered)


def test_squeue_says_why_a_job_waits_and_until_when():
    text = (
        f"7|PENDING|{NOON_S:.0f}|{NOON_S + 7500:.0f}||Resources|run-train\n"
        f"8_[1-2]|PENDING|{NOON_S:.0f}|N/A||JobArrayTaskLimit|run|with|bars\n"
        "9|RUNNING|2026-11-23T12:00:00|2026-11-23T12:00:01|n1|None|x\n"
        "not a row\n"
    )
    waits, array, runs = squeue_rows(text, NOON_S)
    assert waits.status == (JobState.QUEUED, "Resources; expected to start at 14:05")
    assert waits.status.gist == (JobState.QUEUED, "Resources")
    assert (array.job_ids, array.name) == (("8_1", "8_2"), "run|with|bars")
    assert array.status == (JobState.QUEUED, "JobArrayTaskLimit")
    (late,) = squeue_rows(f"7|PENDING|1|{NOON_S - 60:.0f}||Priority|x", NOON_S)
    assert late.status.reason == "Priority", "a start that has passed is not expected"
    assert (runs.status, runs.submitted_at_s) == ((JobState.RUNNING, ""), NOON_S), "a client that knows no %s"


def test_accounting_knows_who_cancelled_a_job():
    me = pwd.getpwuid(os.getuid()).pw_name
    lines = [f"7|CANCELLED by {os.getuid()}|5||None|a", "8|CANCELLED by 987654|5|None assigned|None|b"]
    text = "\n".join([*lines, "9_[0-1]|PENDING|5|None assigned|None|c|d"])
    mine, theirs, waits = sacct_rows(text)
    assert mine.status == (JobState.CANCELLED, f"by {me}")
    assert theirs.status.reason == "by user 987654"
    assert (waits.job_ids, waits.name) == (("9_0", "9_1"), "c|d")


def test_accounting_that_has_not_heard_of_a_jobs_name_yet_says_none():
    assert [row.name for row in sacct_rows("7|COMPLETED|5|n1|None|allocation\n7|COMPLETED|5|n1|None|a\n")] == ["", "a"]


def test_scontrol_knows_how_often_a_job_was_started():
    text = (
        "JobId=7 JobName=a name UserId=root(0) JobState=RUNNING Reason=None Restarts=2 SubmitTime=1700000000\n"
        "JobId=12 ArrayJobId=11 ArrayTaskId=4 JobName=b UserId=root(0) JobState=NODE_FAIL Reason=NodeDown Restarts=0 "
        "NodeList=n4\n"
        "JobId=11 ArrayJobId=11 ArrayTaskId=5-6%1 JobName=b UserId=root(0) JobState=PENDING Reason=JobArrayTaskLimit\n"
        "\n"
    )
    job, element, waiting = scontrol_rows(text)
    assert (job.job_ids, job.name, job.num_restarts, job.submitted_at_s) == (("7",), "a name", 2, 1.7e9)
    assert (element.job_ids, element.status) == (("11_4",), (JobState.NODE_FAIL, "NodeDown on n4"))
    assert (waiting.job_ids, waiting.num_restarts) == (("11_5", "11_6"), None)


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("REQUEUE_HOLD", "job_requeued_in_held_state", (JobState.QUEUED, "requeue hold, job_requeued_in_held_state")),
        ("OUT_OF_MEMORY", "OutOfMemory", (JobState.OOM, "OutOfMemory")),
        ("DEADLINE", "DeadLine", (JobState.TIMEOUT, "deadline, DeadLine")),
        ("PREEMPTED", "(null)", (JobState.PREEMPTED, "")),
        ("LEVITATING", "None", (JobState.RUNNING, "Slurm state LEVITATING")),
    ],
)
def test_states_keep_slurms_word_where_ours_says_less(state, reason, expected):
    assert status_of(state, reason) == expected


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("PartitionTimeLimit", "its time limit is above the partition's: lower cluster.slurm.time_limit_min"),
        ("BadConstraints", "no node has all that it asks for"),
        ("QOSMaxGRESPerJob", "its account or QOS does not let one job have that much"),
        ("launch failed requeued held", "its launch failed and it is held"),
        ("Priority", ""),
        ("QOSMaxJobsPerUserLimit", ""),
    ],
)
def test_a_job_that_can_never_start_says_so_and_why(reason, why):
    (row,) = squeue_rows(f"7|PENDING|5|N/A||{reason}|x", NOON_S)
    assert row.status.reason.startswith(f"{reason}: it will never start, {why}" if why else reason)
    assert ("never" in row.status.reason) is bool(why)


def test_every_state_has_a_meaning_and_only_ends_are_final():
    alive = {word for word in STATES if not status_of(word, "None").state.is_final}
    assert {"COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT"} <= alive
    assert not alive & {"BOOT_FAIL", "DEADLINE", "REVOKED", "TIMEOUT", "COMPLETED"}
