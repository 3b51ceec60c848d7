import dataclasses
import os
import pwd
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.launch import JobHandle, JobState, JobStatus
from dflop.launch.watcher import STATES, Watcher, expand, read_rows, status_of

NOON_S = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))


class FakeSlurm:
    """Answers the two clients from tables, and counts the calls."""

    def __init__(self) -> None:
        self.queue: dict[str, str] = {}
        """state|reason by id, in squeue; with more fields behind, submission and script."""
        self.accounting: dict[str, str] | None = None
        self.is_down = False
        self.num_restarts = 0
        self.cluster = ""
        """The clients know jobs only if they are asked for this cluster."""
        self.calls: list[str] = []
        self.now_s = 0.0

    def __call__(self, args: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(args[0])
        if self.cluster and ["-M", self.cluster] != list(args[1:3]):
            return subprocess.CompletedProcess(args, 1, "", "slurm_load_jobs error: Invalid job id specified")
        code, out, err = getattr(self, f"_{args[0]}")(args[-1].split(","))
        return subprocess.CompletedProcess(args, code, out, err)

    def _squeue(self, ids: list[str]) -> tuple[int, str, str]:
        if self.is_down:
            return 1, "", "slurm_load_jobs error: Unable to contact slurm controller"
        lines = [self._row(i, row) for i, row in self.queue.items() if i.partition("_")[0] in ids]
        return (0, "\n".join(lines), "") if lines else (1, "", "slurm_load_jobs error: Invalid job id specified")

    def _row(self, job_id: str, row: str) -> str:
        state, reason, *more = row.split("|")
        submitted, script = more or (f"{NOON_S:.0f}", "")
        return f"{self.num_restarts}|{job_id}|{state}|{submitted}|N/A|n1|{reason}|{script}"

    def _sacct(self, ids: list[str]) -> tuple[int, str, str]:
        if self.accounting is None:
            return 1, "", "Slurm accounting storage is disabled"
        rows = [(i, row) for i, row in self.accounting.items() if i.partition("_")[0] in ids]
        return 0, "\n".join(f"{i}|{row}" for i, row in rows), ""


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def watcher(slurm: FakeSlurm) -> Watcher:
    return Watcher(poll_interval_s=30, lost_after_s=100, command=slurm, now=lambda: NOON_S + slurm.now_s)


@pytest.fixture
def job(tmp_path: Path):
    def make(job_id: str, name: str = "job", at_s: float = NOON_S) -> JobHandle:
        return JobHandle("slurm", job_id, name, f"key-{job_id}", tmp_path, 1, at_s)

    return make


def status(watcher: Watcher, handle: JobHandle) -> JobStatus:
    return watcher.statuses([handle])[0]


def test_one_call_serves_all_jobs_and_is_not_repeated_within_the_interval(slurm, watcher, job):
    handles = [job("1"), job("2")]
    watcher.note(handles)
    slurm.queue = {"1": "RUNNING|None", "2": "PENDING|Resources"}
    for _ in range(5):
        assert watcher.statuses(handles) == [(JobState.RUNNING, ""), (JobState.QUEUED, "Resources")]
    assert slurm.calls == ["squeue"]
    slurm.now_s = 30
    slurm.queue["2"] = "OUT_OF_MEMORY|OutOfMemory"
    assert status(watcher, handles[1]) == (JobState.OOM, "OutOfMemory")
    assert slurm.calls == ["squeue"] * 2


def test_ended_jobs_are_not_asked_for_again(slurm, watcher, job):
    slurm.queue = {"1": "COMPLETED|None"}
    assert status(watcher, job("1")).state is JobState.DONE
    slurm.queue, slurm.now_s = {}, 1000
    assert status(watcher, job("1")).state is JobState.DONE
    assert slurm.calls == ["squeue"]


@pytest.mark.parametrize("row", ["", "CANCELLED|None"])
def test_accounting_is_asked_once_for_what_squeue_has_forgotten_or_who_cancelled(slurm, watcher, job, row):
    slurm.queue = {"7": row} if row else {}
    slurm.accounting = {"7": f"CANCELLED by 987654|{NOON_S:.0f}|N/A|n1|None|job"}
    for slurm.now_s in (0, 30):
        assert status(watcher, job("7")) == (JobState.CANCELLED, "by uid 987654")
    assert slurm.calls == ["squeue", "sacct"]


def test_an_end_that_nobody_can_explain_is_an_end_all_the_same(slurm, watcher, job):
    slurm.queue = {"7": "CANCELLED|None"}
    assert status(watcher, job("7")) == (JobState.CANCELLED, "")


@pytest.mark.parametrize("row", [f"RUNNING|{NOON_S:.0f}", f"COMPLETED|{NOON_S - 86400:.0f}"])
def test_what_accounting_keeps_as_running_or_of_an_older_job_is_not_believed(slurm, watcher, job, row):
    """A controller that lost its state leaves such rows behind for ever, or begins to count anew."""
    slurm.accounting = {"7": f"{row}|N/A|n1|None|job"}
    found = [status(watcher, job("7")).state for slurm.now_s in (0, 50, 120)]
    assert found == [JobState.QUEUED, JobState.QUEUED, JobState.LOST]


def test_a_job_nobody_knows_is_lost_after_a_grace_only(slurm, watcher, job):
    slurm.queue = {"1": "RUNNING|None"}
    assert status(watcher, job("1")).state is JobState.RUNNING
    slurm.queue = {}
    for slurm.now_s in (30, 60, 120):
        assert status(watcher, job("1")).state is JobState.RUNNING
    slurm.now_s = 150
    assert status(watcher, job("1")).state is JobState.LOST


def test_a_job_that_comes_back_gets_a_new_grace(slurm, watcher, job):
    assert status(watcher, job("1")).state is JobState.QUEUED
    slurm.now_s, slurm.queue = 90, {"1": "RUNNING|None"}
    assert status(watcher, job("1")).state is JobState.RUNNING
    slurm.now_s, slurm.queue = 120, {}
    assert status(watcher, job("1")).state is JobState.RUNNING
    slurm.now_s = 200
    assert status(watcher, job("1")).state is JobState.RUNNING


def test_a_controller_that_is_down_loses_nobody_and_its_silence_is_said(slurm, watcher, job):
    slurm.queue = {"1": "RUNNING|None"}
    status(watcher, job("1"))
    slurm.is_down = True
    for slurm.now_s in (7500, 7600, 20000):
        found = status(watcher, job("1"))
        assert found.state is JobState.RUNNING
        assert found.reason.startswith("squeue has not responded since 14:05: ")
        assert "Unable to contact slurm controller" in found.reason
    slurm.is_down, slurm.now_s = False, 20100
    assert status(watcher, job("1")) == (JobState.RUNNING, "")
    slurm.is_down, slurm.now_s = True, 20200
    assert "since 17:36: " in status(watcher, job("1")).reason, "a new silence"


@pytest.mark.parametrize(
    "row", [f"FAILED|None|{NOON_S - 86400:.0f}|/tmp/copy", f"RUNNING|None|{NOON_S + 3600:.0f}|/home/else/job.sbatch"]
)
def test_another_job_with_the_same_id_is_not_ours(slurm, watcher, job, row):
    """Of a controller that began to count anew: it had the id before us, or has it now."""
    slurm.queue = {"7": row}
    found = status(watcher, job("7"))
    assert (found.state, "unknown to Slurm" in found.reason) == (JobState.QUEUED, True)
    assert watcher.not_anothers([job("7"), job("8")]) == [job("8")], "whose scancel would end the other job"
    slurm.now_s = 120
    assert status(watcher, job("7")).state is JobState.LOST


@pytest.mark.parametrize(
    ("restarts", "submitted_s", "script"),
    [
        pytest.param(0, NOON_S, "/var/spool/copy", id="a site's sbatch submits a copy"),
        pytest.param(0, NOON_S - 86400, "", id="clock of the controller a day behind"),
        pytest.param(0, NOON_S + 86400, "", id="clock of the controller a day ahead"),
        pytest.param(2, NOON_S + 7200, "/var/spool/copy", id="requeued hours later"),
    ],
)
def test_a_job_is_itself_whatever_its_name_and_by_any_clock(slurm, watcher, job, restarts, submitted_s, script):
    """squeue is not asked for names, comments or partitions, so nobody can change who a job is by changing those."""
    slurm.num_restarts, slurm.queue = restarts, {"7": f"RUNNING|None|{submitted_s:.0f}|{script or job('7').script}"}
    assert status(watcher, job("7")).state is JobState.RUNNING
    assert watcher.not_anothers([job("7")]) == [job("7")]


@pytest.mark.parametrize("line", ["sbatch --parsable {}", ""])
def test_accounting_knows_a_job_by_the_command_that_submitted_it(slurm, watcher, job, line):
    """Or by time, where it does not say."""
    at_s = NOON_S - 86400 if line else NOON_S + 7200
    slurm.accounting = {"7": f"COMPLETED|{at_s:.0f}|N/A|n1|None|{line.format(job('7').script)}"}
    assert status(watcher, job("7")).state is JobState.DONE


def test_jobs_that_this_process_follows_are_cancelled_without_a_question(slurm, watcher, job):
    """Whoever is told to stop has little time."""
    slurm.queue = {"7": "RUNNING|None"}
    status(watcher, job("7"))
    assert watcher.not_anothers([job("7")]) == [job("7")]
    assert slurm.calls == ["squeue"]
    assert watcher.not_anothers([job("8")]) == [job("8")]
    assert slurm.calls == ["squeue", "squeue"], "submitted by another process"


def test_jobs_of_several_clusters_are_asked_for_there(slurm, watcher, job):
    there, elsewhere = dataclasses.replace(job("7"), cluster="c2"), dataclasses.replace(job("7"), cluster="c3")
    slurm.cluster, slurm.queue = "c2", {"7": "RUNNING|None"}
    found = watcher.statuses([there, elsewhere])
    assert [(s.state, "unknown to Slurm" in s.reason) for s in found] == [
        (JobState.RUNNING, False), (JobState.QUEUED, True),
    ]  # fmt: skip


def test_a_requeued_job_says_how_often_and_why_it_waits():
    """Slurm sets its time of submission anew."""
    text = f"1|7|PENDING|{NOON_S:.0f}|{NOON_S + 7500:.0f}||BeginTime|x|\n2|8|RUNNING|1|1|n1|None|x|\n"
    text += "2|9|COMPLETED|1|1|n1|None|x|"
    assert [str(row.status) for row in read_rows(text, NOON_S)] == [
        "queued: BeginTime, requeued once; expected to start at 14:05", "running: requeued 2 times", "done",
    ]  # fmt: skip


def test_an_element_that_is_cancelled_while_it_waits_is_cancelled_at_once(slurm, watcher, job):
    """Slurm keeps no record of it: squeue and sacct have never heard of it."""
    handles = [job(f"7_{element}", f"job-{element}") for element in range(3)]
    slurm.queue = {"7_0": "RUNNING|None", "7_[1-2%1]": "PENDING|JobArrayTaskLimit"}
    watcher.note(handles)
    watcher.statuses(handles)
    slurm.now_s, slurm.queue = 30, {"7_0": "RUNNING|None", "7_[2%1]": "PENDING|JobArrayTaskLimit"}
    assert watcher.statuses(handles)[1] == (JobState.CANCELLED, "while it waited")
    slurm.now_s, slurm.queue = 60, {"7_0": "RUNNING|None", "7_[]": "CANCELLED|None"}
    assert watcher.statuses(handles)[2] == (JobState.CANCELLED, "while it waited")


def test_an_element_that_had_begun_and_is_forgotten_is_not_called_cancelled(slurm, watcher, job):
    handles = [job(f"7_{element}", f"job-{element}") for element in range(2)]
    watcher.note(handles)
    slurm.queue = {"7_[0-1]": "PENDING|None"}
    watcher.statuses(handles)
    handles[1].path("batch.log").write_text("dflop: start 1\n")
    slurm.now_s, slurm.queue = 30, {"7_0": "RUNNING|None"}
    assert watcher.statuses(handles)[1].state is JobState.QUEUED
    slurm.now_s = 150
    assert watcher.statuses(handles)[1].state is JobState.LOST


def test_the_exit_file_is_asked_last_and_sacct_is_left_alone(slurm, watcher, job):
    without, failed, done = job("7"), job("8"), job("9")
    for handle, code in ((failed, 3), (done, 0)):
        handle.path("exit").write_text(f"{code}\n")
    found = watcher.statuses([without, failed, done])
    assert [s.state for s in found] == [JobState.QUEUED, JobState.FAILED, JobState.DONE]
    slurm.now_s = 30
    watcher.statuses([without])
    assert slurm.calls == ["squeue", "sacct", "squeue"], "which does not work here"


def test_of_two_jobs_with_one_id_the_later_one_is_asked_for(slurm, watcher, job):
    before, now = job("7", at_s=NOON_S - 86400), job("7")
    watcher.statuses([before])
    slurm.queue = {"7": "RUNNING|None"}
    assert status(watcher, now).state is JobState.RUNNING
    assert status(watcher, before).state is JobState.QUEUED, "what was known of it"


@pytest.mark.parametrize(
    ("job_id", "jobs"),
    [
        ("123", ("123",)), ("123_[0-8:4]", ("123_0", "123_4", "123_8")), ("123_[]", ("123",)), ("het+1", ("het+1",)),
    ],
)  # fmt: skip
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
        f"0|7|PENDING|{NOON_S:.0f}|{NOON_S + 7500:.0f}||Resources|run-train\n"
        f"0|8_[1-2]|PENDING|{NOON_S:.0f}|N/A||JobArrayTaskLimit|run|with|bars\n"
        "0|9|RUNNING|2026-11-23T12:00:00|2026-11-23T12:00:01|n1|None|x\n"
        "not a row\n"
    )
    waits, array, runs = read_rows(text, NOON_S)
    assert waits.status == (JobState.QUEUED, "Resources; expected to start at 14:05")
    assert waits.status.gist == (JobState.QUEUED, "Resources")
    assert (array.job_ids, array.script) == (("8_1", "8_2"), "run|with|bars")
    assert array.status == (JobState.QUEUED, "JobArrayTaskLimit")
    (late,) = read_rows(f"0|7|PENDING|1|{NOON_S - 60:.0f}||Priority|x", NOON_S)
    assert late.status.reason == "Priority", "a start that has passed is not expected"
    assert (runs.status, runs.submitted_at_s) == ((JobState.RUNNING, ""), NOON_S), "a client that knows no %s"


def test_accounting_knows_who_cancelled_a_job():
    me = pwd.getpwuid(os.getuid()).pw_name
    lines = [f"0|7|CANCELLED by {os.getuid()}|5|6||None|a", "0|8|CANCELLED by 987654|5|6|None assigned|None|b"]
    text = "\n".join([*lines, "0|9_[0-1]|PENDING|5|Unknown|None assigned|None|c|d"])
    mine, theirs, waits = read_rows(text, NOON_S)
    assert mine.status == (JobState.CANCELLED, f"by {me}")
    assert theirs.status.reason == "by uid 987654"
    assert (waits.job_ids, waits.script) == (("9_0", "9_1"), "c|d")


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
        ("PartitionTimeLimit", "its time limit is above the partition's: see cluster.slurm.time_limit_min"),
        ("QOSMaxWallDurationPerJobLimit", "its time limit is above that of its account or QOS: see cluster.slurm.time"),
        ("InvalidQOS", "Slurm knows no such QOS"), ("InvalidAccount", "Slurm knows no such account: see cluster."),
        ("ReservationDeleted", "its reservation is over"), ("DependencyNeverSatisfied", "the job it depends on failed"),
        ("Dependency", ""), ("Reservation", ""), ("AssocMaxJobsLimit", ""), ("QOSMaxGRESPerUser", ""),
        ("AssocGrpSubmitJobsLimit", ""), ("PartitionDown", ""), ("ReqNodeNotAvail, Reserved for maintenance", ""),
        ("BadConstraints", "no node has the requested resources"),
        ("QOSMaxGRESPerJob", "its account or QOS does not allow that much per job"),
        ("launch failed requeued held", "its launch failed and it is held"), ("Priority", ""),
        ("QOSMaxJobsPerUserLimit", ""),
    ],
)  # fmt: skip
def test_a_job_that_can_never_start_says_so_and_why(reason, why):
    (row,) = read_rows(f"0|7|PENDING|5|N/A||{reason}|x", NOON_S)
    assert row.status.reason.startswith(f"{reason}: it will never start, {why}" if why else reason)
    assert ("never" in row.status.reason) is bool(why)


def test_every_state_has_a_meaning_and_only_ends_are_final():
    alive = {word for word in STATES if not status_of(word, "None").state.is_final}
    assert {"COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT"} <= alive
    assert not alive & {"BOOT_FAIL", "DEADLINE", "REVOKED", "TIMEOUT", "COMPLETED"}
