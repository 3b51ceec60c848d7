import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import LaunchError
from dflop.launch import JobHandle, JobState, JobStatus, Journal
from dflop.launch.payload import START_LINE
from dflop.launch.tail import MAX_READ_BYTES, LogTail
from tests.launch.helpers import live


def handle_of(tmp_path: Path, job_id: str, key: str = "k") -> JobHandle:
    return JobHandle("local", job_id, "job", key, tmp_path, 2, 12.5)


def test_live_is_the_latest_job_of_the_key_that_was_not_seen_to_end(tmp_path):
    journal = Journal(tmp_path / "run", "r1")
    assert live(journal, "k") is None
    first, second = handle_of(tmp_path, "1"), handle_of(tmp_path, "2")
    journal.submitted(first)
    journal.changes([(first, JobStatus(JobState.FAILED, "no luck"))])
    assert live(journal, "k") is None
    journal.submitted(second)
    journal.changes([(second, JobStatus(JobState.RUNNING))])
    journal.submitted(handle_of(tmp_path, "3", key="other"))
    assert live(Journal(tmp_path / "run", "r1"), "k") == second
    assert [(r.job_id, r.attempt, r.state) for r in journal.records()] == [
        ("1", 0, "queued"),
        ("1", 0, "failed"),
        ("2", 1, "queued"),
        ("2", 1, "running"),
        ("3", 0, "queued"),
    ]


@pytest.mark.parametrize("num_lines", [1, 500])
def test_a_torn_line_in_a_long_journal_costs_no_other(tmp_path, num_lines):
    """500 lines are longer than what is read to find the tear."""
    journal = Journal(tmp_path, "r1")
    journal.submitted(*(handle_of(tmp_path, f"{n}") for n in range(num_lines)))
    assert (journal.path.stat().st_size > 1 << 16) is (num_lines == 500)
    journal.path.write_bytes(journal.path.read_bytes() + b'{"run_id": "r1", "job_na')
    assert len(journal.records()) == num_lines
    Journal(tmp_path, "r1").submitted(handle_of(tmp_path, "last"))
    assert [r.job_id for r in Journal(tmp_path, "r1").records()] == [*map(str, range(num_lines)), "last"]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    journal = Journal(tmp_path, "r1")
    journal.path.write_text("not json\n")
    with pytest.raises(LaunchError, match="line 1 of the job journal"):
        journal.records()


def test_what_is_noted_together_is_one_write(tmp_path, monkeypatch):
    journal, other = Journal(tmp_path, "r1"), Journal(tmp_path, "r1")
    handles = [handle_of(tmp_path, f"7_{n}", key=f"k{n}") for n in range(50)]
    journal.submitted(*handles)
    writes: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, text: writes.append(len(text)) or write(fd, text))
    journal.changes([(h, JobStatus(JobState.RUNNING)) for h in handles])
    journal.changes([(h, JobStatus(JobState.RUNNING, "requeued once")) for h in handles])
    assert len(writes) == 1, "a state they have is not noted again"
    assert len(other.records()) == len(journal.records()) == 100
    other.changes([(handles[0], JobStatus(JobState.DONE))])
    assert journal.records()[-1].state == "done", "another process appended"


def test_an_id_that_comes_again_is_another_job(tmp_path):
    """Of a controller that counts from 1 again."""
    journal, before = Journal(tmp_path, "r1"), handle_of(tmp_path, "7")
    journal.submitted(before)
    journal.changes([(before, JobStatus(JobState.DONE))])
    now = dataclasses.replace(before, submitted_at_s=99.5)
    journal.submitted(now)
    journal.changes([(now, JobStatus(JobState.RUNNING))])
    assert live(Journal(tmp_path, "r1"), "k") == now
    assert list(journal.jobs()) == [("", "7", 12.5), ("", "7", 99.5)]
    journal.changes([(now, JobStatus(JobState.DONE))])
    assert [(r.attempt, r.state) for r in journal.records()[-2:]] == [(1, "running"), (1, "done")]


def test_how_a_job_ended_is_known_until_another_begins(tmp_path):
    journal, first = Journal(tmp_path, "r1"), handle_of(tmp_path, "1")
    assert journal.latest() == {}
    journal.submitted(first)
    assert journal.latest() == {"k": (first, JobState.QUEUED)}
    journal.changes([(first, JobStatus(JobState.DONE))])
    assert journal.latest() == {"k": (first, JobState.DONE)}
    second = handle_of(tmp_path, "2")
    journal.submitted(second)
    assert journal.latest() == {"k": (second, JobState.QUEUED)}


@given(st.lists(st.tuples(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=9), st.booleans())))
def test_tail_passes_on_every_line_once_however_it_is_written(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("tail") / "log"
    tail, seen = LogTail(path), []
    with path.open("a") as file:
        for text, ends_line in parts:
            file.write(text + "\n" * ends_line)
            file.flush()
            seen += list(tail.read())
    seen += list(tail.read(is_last=True))
    assert seen == path.read_text().splitlines()


def test_tail_skips_what_is_too_much_and_says_so(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(10 * MAX_READ_BYTES)))
    skip, *lines = LogTail(path).read()
    assert "skipped" in skip
    assert str(path) in skip
    assert lines[-1] == f"line {10 * MAX_READ_BYTES - 1}"
    assert lines[0].startswith("line "), "whole lines only"


@pytest.mark.parametrize("reads_every_line", [True, False])
def test_tail_leaves_out_the_traceback_that_ends_a_task(tmp_path, reads_every_line):
    path, start = tmp_path / "log", f"{START_LINE}2"
    begins = "submitit ERROR (x) - Submitted job triggered an exception"
    tail, seen = LogTail(path), []
    trace = ["Traceback (most recent call last):", '  File "a.py"', "ValueError: a", "", "  hint:  b"]
    with path.open("a") as file:
        for line in ["Traceback of a library", begins, *trace, start, begins, *trace]:
            file.write(line + "\n")
            file.flush()
            if reads_every_line:
                seen += list(tail.read())
    seen += list(tail.read(is_last=True))
    assert seen == ["Traceback of a library", start]


def test_a_log_that_cannot_be_read_just_now_has_no_new_lines(tmp_path):
    tail = LogTail(tmp_path)  # reading a folder fails as a stale handle does
    assert list(tail.read()) == []
    assert list(LogTail(tmp_path / "absent").read(is_last=True)) == []


def test_tail_gets_past_a_line_longer_than_one_read(tmp_path):
    path = tmp_path / "log"
    path.write_text("x" * (3 * MAX_READ_BYTES) + "\nend\n")
    assert list(LogTail(path).read())[-1] == "end"
