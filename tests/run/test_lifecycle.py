from __future__ import annotations

import os
import socket
import stat
import time

import pytest

from dflop.config import Config
from dflop.errors import LaunchError
from dflop.launch import Journal
from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.records import JobRecord, RunRecord
from dflop.run import lifecycle
from dflop.run.driver_lock import drive_alone
from dflop.store.spool import SpoolWriter, read_spool
from tests.jobs.configs import make_config
from tests.jobs.made import make_run


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


def note(run, config, state):
    lifecycle.note(run, config, state, config_key=config.key)


def test_a_new_run_is_private_and_holds_its_configuration_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, "runs=there", "store=here", "dataset.media_root=media", "train.metrics_dir=seen")
    run, is_resumed = lifecycle.begin(config)
    assert not is_resumed
    assert (run.state()["state"], lifecycle.key_of(run)) == (lifecycle.READY, config.key)
    assert lifecycle.begin(config) == (run, True), "its first driver may have died at once"
    assert run.path.parent == tmp_path / "there"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    resolved = run.config()
    assert (resolved.store, resolved.runs) == (tmp_path / "here", tmp_path / "there")
    assert resolved.dataset.media_root == tmp_path / "media"
    assert resolved.train == config.train.model_copy(update={"metrics_dir": tmp_path / "seen"})


@pytest.mark.parametrize(
    ("state", "is_resumed"), [(lifecycle.RUNNING, True), (lifecycle.FAILED, True), (lifecycle.DONE, False)]
)
def test_an_unfinished_run_of_the_same_configuration_is_taken_up_again(tmp_path, config, state, is_resumed):
    first, _ = lifecycle.begin(config)
    note(first, config, state)
    (first.path.parent / "not-a-run").mkdir()
    assert lifecycle.unfinished(make_config(tmp_path, "train.num_steps=3")) is None
    second, resumed = lifecycle.begin(config)
    assert resumed == is_resumed
    assert (second.path == first.path) == is_resumed


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own_and_the_newest_is_taken_up(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    begun = [lifecycle.begin(make_config(tmp_path, f"train.seed={seed}"))[0] for seed in range(3)]
    assert [r.run_id for r in begun] == [f"small-20260101-000000{s}" for s in ("", "-2", "-3")]
    assert [r.config().train.seed for r in begun] == [0, 1, 2]
    config = begun[0].config()
    for day in ("3", "2"):
        make_run(tmp_path, f"small-2026010{day}-000000", lifecycle.FAILED, config_key=lifecycle.key_of(begun[0]))
    assert lifecycle.unfinished(config).run_id == "small-20260103-000000"


def test_a_run_that_somebody_drives_is_not_taken_up(config):
    run, _ = lifecycle.begin(config)
    with drive_alone(run, print):
        with pytest.raises(LaunchError, match=f"driven by process {os.getpid()} on {socket.gethostname()} since 20"):
            lifecycle.begin(config)
        with pytest.raises(LaunchError, match="dflop cancel"):
            lifecycle.check_free(config)
    assert lifecycle.begin(config) == (run, True)


def test_a_change_of_state_is_in_the_run_directory_and_in_the_spool(config):
    run, _ = lifecycle.begin(config)
    note(run, config, lifecycle.RUNNING)
    note(run, config, lifecycle.DONE)
    assert run.state()["state"] == lifecycle.DONE
    assert run.state()["by"] == {"host": socket.gethostname(), "pid": os.getpid()}
    assert run.state()["num_steps"] == config.train.num_steps
    records = read_spool(config.store, RunRecord)
    assert [(r.run_id, r.name, r.state, r.config_key) for r in records] == [
        (run.run_id, "small", state, config.key) for state in (lifecycle.RUNNING, lifecycle.DONE)
    ]
    assert all(r.hardware.startswith("cpu: ") and "torch" in r.software and r.code_rev for r in records)


class Killed(BaseException):
    """In place of a signal that nobody can catch."""


class Journalled:
    """A run with a job, whose journal goes to the spool."""

    def __init__(self, config: Config) -> None:
        self.config, (self.run, _) = config, lifecycle.begin(config)
        self.mark = self.run.path / "jobs.spooled"
        self._journal = Journal(self.run.path, self.run.run_id)
        self._handle = JobHandle("local", "1", "n", "key", self.run.path / "jobs" / "n", 1, 5.0)

    def note(self, *states: JobState) -> None:
        for state in states:
            if state is JobState.QUEUED:
                self._journal.submitted(self._handle)
            else:
                self._journal.changed(self._handle, JobStatus(state))

    def spool(self) -> list[str]:
        """What the spool has afterwards."""
        lifecycle.spool_journal(self.run, self.config)
        return [r.state for r in read_spool(self.config.store, JobRecord)]

    def die(self, monkeypatch: pytest.MonkeyPatch, *, is_written: bool) -> None:
        """The process is killed before or behind the rows."""
        close = SpoolWriter.close

        def dies(writer: SpoolWriter) -> None:
            if is_written:
                close(writer)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(SpoolWriter, "close", dies)
            with pytest.raises(Killed):
                self.spool()


@pytest.fixture
def journalled(config: Config) -> Journalled:
    return Journalled(config)


@pytest.mark.parametrize("is_written", [None, False, True])
def test_journal_entries_are_spooled_once_whether_or_not_their_driver_is_killed(journalled, monkeypatch, is_written):
    assert journalled.spool() == []
    journalled.note(JobState.QUEUED)
    assert journalled.spool() == ["queued"]
    journalled.note(JobState.RUNNING)
    if is_written is not None:
        journalled.die(monkeypatch, is_written=is_written)
    journalled.note(JobState.DONE)
    for _ in range(2):
        assert journalled.spool() == ["queued", "running", "done"]


def test_where_the_note_of_what_was_spooled_is_lost_or_damaged_the_store_is_asked(journalled):
    journalled.note(JobState.QUEUED)
    journalled.spool()
    expected = ["queued"]
    for note in (None, b"", b"12 x", b"1 2 3 4", b"\xff\x00"):
        journalled.mark.unlink()
        if note is not None:
            journalled.mark.write_bytes(note)
        if note == b"\xff\x00":
            journalled.note(JobState.RUNNING)
            expected.append("running")
        for _ in range(2):
            assert journalled.spool() == expected
    assert journalled.mark.read_text() == "2"


def test_a_driver_that_is_killed_while_the_store_knows_what_its_note_does_not_loses_nothing(journalled, monkeypatch):
    journalled.note(JobState.QUEUED)
    journalled.spool()
    journalled.note(JobState.RUNNING)
    journalled.mark.write_text("?")
    for is_written in (False, True):
        journalled.die(monkeypatch, is_written=is_written)
    assert journalled.spool() == ["queued", "running"]
