import os
import pwd
import re
import secrets
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflop.errors import LaunchError
from dflop.launch import Journal
from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.records import JobRecord, RunRecord
from dflop.run import lifecycle
from dflop.run.driver_lock import drive_alone
from dflop.run.find import all_runs, find_run, this_user
from dflop.store.spool import SpoolWriter
from tests.jobs.configs import make_config
from tests.jobs.made import begun_at, make_run
from tests.store.spooled import read_spool


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


def test_a_new_run_is_private_and_holds_its_configuration_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, "runs=there", "store=here", "dataset.media_root=media")
    run, is_resumed = lifecycle.begin(config)
    assert not is_resumed
    assert (run.state()["state"], lifecycle.key_of(run)) == (lifecycle.READY, config.key)
    assert lifecycle.begin(config) == (run, True), "its first driver may have died at once"
    assert run.path.parent == tmp_path / "there"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    resolved = run.config()
    assert (resolved.store, resolved.runs) == (tmp_path / "here", tmp_path / "there")
    assert resolved.dataset.media_root == tmp_path / "media"


@pytest.mark.parametrize(
    ("state", "is_resumed"), [(lifecycle.RUNNING, True), (lifecycle.FAILED, True), (lifecycle.DONE, False)]
)
def test_an_unfinished_run_of_the_same_configuration_is_taken_up_again(tmp_path, config, state, is_resumed):
    first, _ = lifecycle.begin(config)
    lifecycle.note(first, state)
    (first.path.parent / "not-a-run").mkdir()
    assert lifecycle.unfinished(make_config(tmp_path, "train.num_steps=3")) is None
    second, resumed = lifecycle.begin(config)
    assert resumed == is_resumed
    assert (second.path == first.path) == is_resumed


def test_runs_that_begin_in_the_same_second_have_different_ids_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    folders = ("runs=a", "runs=b", "runs=a", "runs=c")
    monkeypatch.chdir(tmp_path)
    begun = [lifecycle.begin(make_config(tmp_path, f, f"train.seed={seed}"))[0] for seed, f in enumerate(folders)]
    assert len({run.run_id for run in begun}) == len(begun)
    assert all(re.fullmatch(r"small-20260101-000000-[b-z]{5}", run.run_id) for run in begun)
    assert [find_run(run.run_id[:-1], run.path.parent) for run in begun] == begun, "by the beginning of an id, too"
    for run in begun:
        lifecycle.note(run, lifecycle.RUNNING)
    records = read_spool(tmp_path / "store", RunRecord)
    assert {(r.run_id, r.run_dir, r.owner) for r in records} == {
        (run.run_id, str(run.path), run.state()["owner"]) for run in begun
    }


def test_the_newest_run_is_the_one_that_began_last_whatever_its_letters(tmp_path, monkeypatch):
    letters = iter("zzzzzmmmmmbbbbb")
    monkeypatch.setattr(secrets, "choice", lambda _: next(letters))
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    begun = [
        begun_at(lifecycle.begin(make_config(tmp_path, f"train.seed={seed}"))[0], 1000.0 + seed) for seed in range(3)
    ]
    assert [run.run_id[-5:] for run in begun] == ["zzzzz", "mmmmm", "bbbbb"]
    folder = begun[0].path.parent
    assert (all_runs(folder), find_run("latest", folder)) == (begun[::-1], begun[-1])


def test_two_runs_never_share_a_folder_even_with_the_same_letters(tmp_path, monkeypatch):
    letters = iter("bbbbbbbbbbccccc")
    monkeypatch.setattr(secrets, "choice", lambda _: next(letters))
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    begun = [lifecycle.begin(make_config(tmp_path, f"train.seed={seed}"))[0] for seed in range(2)]
    assert [run.run_id[-5:] for run in begun] == ["bbbbb", "ccccc"]


@pytest.mark.parametrize(("uid", "name"), [(os.geteuid(), pwd.getpwuid(os.geteuid()).pw_name), (123456, "uid 123456")])
def test_a_run_has_the_name_of_its_owner_or_the_number_of_one_without(monkeypatch, uid, name):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert this_user() == f"{name}@{socket.gethostname()}"


def test_the_newest_unfinished_run_of_a_configuration_is_taken_up(tmp_path, config):
    first, _ = lifecycle.begin(config)
    for day in ("2", "3"):
        make_run(tmp_path, f"small-2026010{day}-000000", lifecycle.FAILED, config_key=lifecycle.key_of(first))
    assert lifecycle.unfinished(config).run_id == "small-20260103-000000"


def test_a_run_that_somebody_drives_is_not_taken_up(config):
    run, _ = lifecycle.begin(config)
    with drive_alone(run, print):
        who = f"driver: process {os.getpid()} on {socket.gethostname()} since 20"
        with pytest.raises(LaunchError, match=rf"{who}[\s\S]*dflop cancel"):
            lifecycle.begin(config)
    assert lifecycle.begin(config) == (run, True)


def test_drivers_of_one_configuration_that_begin_at_once_share_a_run_and_one_of_them_drives_it(config):
    """Threads are as good as processes: each opens the lock's file, and the lock is the open file's."""
    start, done = threading.Barrier(6), threading.Barrier(6)

    def drive(_number: int) -> str:
        start.wait(60)
        try:
            run, _ = lifecycle.begin(config)
            with drive_alone(run, print):
                done.wait(60)
                return "drives"
        except LaunchError as error:
            done.wait(60)
            return error.what

    with ThreadPoolExecutor(6) as pool:
        said = sorted(pool.map(drive, range(6)))
    (run,) = config.runs.glob("small-*")
    assert said[0] == "drives"
    assert all(what.startswith(f"run `{run.name}` already has a driver: ") for what in said[1:])


def test_a_change_of_state_is_in_the_run_directory_and_in_the_spool(config):
    run, _ = lifecycle.begin(config)
    lifecycle.note(run, lifecycle.RUNNING)
    lifecycle.note(run, lifecycle.DONE)
    assert run.state()["state"] == lifecycle.DONE
    assert run.state()["by"] == {"host": socket.gethostname(), "pid": os.getpid()}
    assert run.state()["num_steps"] == config.train.num_steps
    records = read_spool(config.store, RunRecord)
    assert [(r.run_id, r.name, r.state, r.config_key) for r in records] == [
        (run.run_id, "small", state, config.key) for state in (lifecycle.RUNNING, lifecycle.DONE)
    ]
    assert all(r.hardware.startswith("cpu: ") and "torch" in r.software and r.code_rev for r in records)


@pytest.mark.parametrize("is_written", [False, True])
def test_journal_entries_are_spooled_once_whether_or_not_their_driver_is_killed(config, monkeypatch, is_written):
    run, _ = lifecycle.begin(config)
    journal, handle = Journal(run.path, run.run_id), JobHandle("local", "1", "n", "k", run.path / "jobs/n", 1, 5.0)
    close = SpoolWriter.flush

    def dies(writer: SpoolWriter) -> None:
        if is_written:
            close(writer)
        raise KeyboardInterrupt

    journal.submitted(handle)
    lifecycle.spool_journal(run, config)
    for state in (JobState.RUNNING, JobState.DONE):
        journal.changes([(handle, JobStatus(state))])
        with monkeypatch.context() as patch:
            patch.setattr(SpoolWriter, "flush", dies)
            with pytest.raises(KeyboardInterrupt):
                lifecycle.spool_journal(run, config)
    for _ in range(2):
        lifecycle.spool_journal(run, config)
        assert [r.state for r in read_spool(config.store, JobRecord)] == ["queued", "running", "done"]
