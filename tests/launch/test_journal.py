from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import LaunchError
from dflop.launch import JobHandle, JobState, JobStatus, Journal
from dflop.launch.tail import MAX_READ_BYTES, LogTail


def handle_of(tmp_path: Path, job_id: str, key: str = "k") -> JobHandle:
    return JobHandle("local", job_id, "job", key, tmp_path, 2, 12.5)


def test_live_is_the_latest_job_of_the_key_that_was_not_seen_to_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run", "r1")
    assert journal.live("k") is None
    first, second = handle_of(tmp_path, "1"), handle_of(tmp_path, "2")
    journal.submitted(first)
    journal.changed(first, JobStatus(JobState.FAILED, "no luck"))
    assert journal.live("k") is None
    journal.submitted(second)
    journal.changed(second, JobStatus(JobState.RUNNING))
    journal.submitted(handle_of(tmp_path, "3", key="other"))
    assert Journal(tmp_path / "run", "r1").live("k") == second
    assert [(r.job_id, r.attempt, r.state) for r in journal.records()] == [
        ("1", 0, "queued"),
        ("1", 0, "failed"),
        ("2", 1, "queued"),
        ("2", 1, "running"),
        ("3", 0, "queued"),
    ]


def test_a_line_torn_by_a_crash_is_dropped_and_later_lines_survive(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r1")
    journal.submitted(handle_of(tmp_path, "1"))
    journal.path.write_bytes(journal.path.read_bytes() + b'{"run_id": "r1", "job_na')
    assert len(journal.records()) == 1
    journal.submitted(handle_of(tmp_path, "2"))
    assert [r.job_id for r in journal.records()] == ["1", "2"]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r1")
    journal.path.write_text("not json\n")
    with pytest.raises(LaunchError, match="line 1 of the job journal"):
        journal.records()


@given(st.lists(st.tuples(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=9), st.booleans())))
def test_tail_passes_on_every_line_once_however_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, bool]]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    tail, seen = LogTail(path), []
    with path.open("a") as file:
        for text, ends_line in parts:
            file.write(text + "\n" * ends_line)
            file.flush()
            seen += list(tail.read())
    seen += list(tail.read(is_last=True))
    assert seen == path.read_text().splitlines()


def test_tail_skips_what_is_too_much_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(10 * MAX_READ_BYTES)))
    skip, *lines = LogTail(path).read()
    assert "skipped" in skip
    assert str(path) in skip
    assert lines[-1] == f"line {10 * MAX_READ_BYTES - 1}"
    assert lines[0].startswith("line "), "whole lines only"


def test_tail_gets_past_a_line_longer_than_one_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * (3 * MAX_READ_BYTES) + "\nend\n")
    assert list(LogTail(path).read())[-1] == "end"
