from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.launch import JobHandle, JobState, JobStatus
from dflop.run import logs
from dflop.run.logs import last_lines, new_lines
from dflop.steps.watching import JobProgress, JobTalk

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
