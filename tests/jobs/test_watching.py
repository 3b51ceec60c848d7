from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.jobs import logs, watching
from dflop.jobs.logs import last_lines, new_lines
from dflop.jobs.watching import MAX_LINES, PER_S, JobProgress, JobTalk, steps_logged
from dflop.launch import JobHandle, JobState, JobStatus

HANDLE = JobHandle("slurm", "12", "demo-1-train", "k", Path("/jobs/train"), 4, 5.0)


class Shower:
    """Says lines and shows jobs, as a page does."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.jobs: list[JobProgress] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def job(self, progress: JobProgress) -> None:
        self.jobs.append(progress)


@pytest.fixture
def shower() -> Shower:
    return Shower()


def test_how_a_job_stands_is_told_with_its_steps(shower):
    talk = JobTalk("train", shower)
    talk.state(HANDLE, JobStatus(JobState.QUEUED, "Priority"))
    talk.state(HANDLE, JobStatus(JobState.RUNNING))
    for line in ("loads a checkpoint", "step 12/40  loss 3.1", "step 13/40  loss 3.0"):
        talk.line(line)
    talk.state(HANDLE, JobStatus(JobState.DONE))
    assert [str(job) for job in shower.jobs] == [
        "queued, Priority",
        "running",
        "running, step 12 of 40",
        "running, step 13 of 40",
        "done, step 13 of 40",
    ]
    assert [round(job.done_frac, 3) for job in shower.jobs] == [0, 0, 0.3, 0.325, 1]
    assert "train | step 12/40  loss 3.1" in shower.lines
    assert len(shower.lines) == 6
    other = JobHandle("slurm", "13", "demo-1-train", "k", Path("/jobs/train"), 4, 9.0)
    talk.state(other, JobStatus(JobState.QUEUED))
    assert (shower.jobs[-1].step, shower.jobs[-1].handle.job_id) == (0, "13"), "another job of that name begins anew"


def test_lines_are_enough_for_who_shows_nothing():
    lines: list[str] = []
    talk = JobTalk("data-0", lines.append)
    talk.state(HANDLE, JobStatus(JobState.FAILED, "rank 1: ValueError: x\nwith more"))
    talk.line("a line")
    assert lines[1] == "data-0 | a line"
    assert lines[0].startswith("job `demo-1-train` (slurm 12) is failed")


def test_a_log_that_floods_is_cut_and_it_is_said(shower):
    now = [0.0]
    talk = JobTalk("train", shower, clock=lambda: now[0])
    talk.state(HANDLE, JobStatus(JobState.RUNNING))
    for i in range(3 * MAX_LINES):
        talk.line(f"line {i}")
    assert len(shower.lines) == 1 + MAX_LINES
    talk.line("step 7/9")
    assert shower.jobs[-1].step == 7, "what is not shown is read all the same"
    now[0] = PER_S
    talk.line("after a minute")
    hidden = 2 * MAX_LINES + 1
    assert shower.lines[-2:] == [
        f"train | [{hidden} lines not shown; all of them are in /jobs/train/12_0_log.err]",
        "train | after a minute",
    ]
    for _ in range(2 * MAX_LINES):
        talk.line("more")
    talk.state(HANDLE, JobStatus(JobState.DONE))
    assert any("lines not shown" in line for line in shower.lines[-2:]), "the end of a job says what is missing"


def test_the_end_of_a_log_tells_the_step(tmp_path, monkeypatch):
    log = tmp_path / "log"
    assert steps_logged(log) == (0, 0)
    log.write_text("nothing\n")
    assert steps_logged(log) == (0, 0)
    log.write_text("".join(f"step {i}/500  loss\nnoise\n" for i in range(1, 301)) + "step 301/5")
    assert steps_logged(log) == (301, 5), "a torn line is a line, too"
    monkeypatch.setattr(watching, "_TAIL_BYTES", 40)
    log.write_text("step 1/500\n" + "x" * 100 + "\n")
    assert steps_logged(log) == (0, 0)


@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=12), max_size=40),
    st.integers(0, 45),
    st.integers(1, 64),
)
def test_the_last_lines_are_those_of_the_whole_file(tmp_path_factory, lines, num_lines, block):
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    before, logs.BLOCK_BYTES = logs.BLOCK_BYTES, block
    try:
        text, offset = last_lines(path, num_lines)
    finally:
        logs.BLOCK_BYTES = before
    assert text == "\n".join(lines[len(lines) - min(num_lines, len(lines)) :])
    assert offset == path.stat().st_size


def test_what_is_added_comes_once_and_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 5) == new_lines(path, 0) == ("", 0)
    path.write_text("one\ntwo\nthr")
    text, offset = last_lines(path, 1)
    assert text == "two"
    with path.open("a") as file:
        file.write("ee\nfo")
    text, offset = new_lines(path, offset)
    assert text == "three"
    assert new_lines(path, offset) == ("", offset)
    path.write_text("anew\n")
    assert new_lines(path, offset + 100) == ("anew", 5)
