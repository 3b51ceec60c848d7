"""`dflop runs`, `cancel`, `reap` and `train` as a person meets them, on run directories without any job."""

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest

from dflop.launch import JobState, JobStatus, Journal, log_paths
from dflop.run import lifecycle
from dflop.run.driver_lock import drive_alone
from tests.forked import Program
from tests.jobs.made import add_job, begun_at, make_run, save_step
from tests.launch.helpers import until
from tests.test_cli import assert_refused, dflop, loaded_by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, and a newer one whose training goes on."""
    old = begun_at(make_run(tmp_path, "demo-20260101-000000", lifecycle.DONE), 1000.0)
    save_step(old, 40)
    new = begun_at(make_run(tmp_path, "demo-20260102-000000", lifecycle.RUNNING), 2000.0)
    add_job(new, "data-0", JobState.RUNNING, JobState.DONE)
    handle = add_job(new, "train", JobState.RUNNING, num_tasks=2)
    stdout, stderr = log_paths(handle)
    stdout.write_text("to stdout\n")
    stderr.write_text("".join(f"step {i - 1}  {i}/40 done  loss 3.{i}\n" for i in range(1, 13)))
    log_paths(handle, 1).stderr.write_text("of rank 1\n")
    return tmp_path


def test_runs_are_listed_newest_first_for_people_and_programs(folder):
    shown = dflop("runs", "list", cwd=folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.index("demo-20260102") < shown.stdout.index("demo-20260101")
    assert "train running (local id-train)" in shown.stdout
    assert not re.search(r"\b(driver|plan)\b", shown.stdout), "no run has one"
    rows = list(csv.DictReader(io.StringIO(dflop("runs", "list", "--format", "csv", cwd=folder).stdout)))
    assert [(r["run"], r["state"], r["step"]) for r in rows] == [
        ("demo-20260102-000000", "abandoned", "12"),
        ("demo-20260101-000000", "done", "40"),
    ]
    elsewhere = dflop("runs", "list", "--format", "json", cwd=Path("/"), DFLOP_RUNS=str(folder / "runs"))
    assert [json.loads(line)["num_steps"] for line in elsewhere.stdout.splitlines()] == [40, 40]


def test_listing_runs_loads_nothing_that_computes(folder):
    heavy, shown = loaded_by(folder, "runs", "list")
    assert "demo-20260102" in shown
    assert set(heavy).isdisjoint({"torch", "prefect", "cvxpy", "duckdb", "matplotlib", "scipy"})


def test_a_run_is_shown_with_its_jobs(folder):
    shown = dflop("runs", "show", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert "state      abandoned" in shown.stdout
    assert str(folder / "runs" / "demo-20260102-000000") in shown.stdout
    jobs = [
        json.loads(line)
        for line in dflop("runs", "show", "demo-20260102", "--format", "json", cwd=folder).stdout.splitlines()
    ]
    assert [(j["job"], j["state"]) for j in jobs] == [("data-0", "done"), ("train", "running")]


def test_the_end_of_a_log_is_printed(folder):
    done = dflop("runs", "logs", "latest", "-l", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "to stdout\nstep 10  11/40 done  loss 3.11\nstep 11  12/40 done  loss 3.12\n"
    assert done.stderr == "train, local id-train: running\n"
    assert dflop("runs", "logs", "latest", "train", "--rank", "1", cwd=folder).stdout == "of rank 1\n"


def test_a_log_is_followed_until_its_job_has_ended(folder):
    run = lifecycle.RunDir(folder / "runs" / "demo-20260102-000000")
    handle = add_job(run, "compare", JobState.RUNNING)
    log = log_paths(handle).stderr
    log.write_text("one\n")
    out, err = folder / "out", folder / "err"
    with drive_alone(run, print):  # its driver keeps the journal
        following = Program("dflop.cli", ("runs", "logs", "latest", "-f"), os.environ, out, err=err, cwd=folder)
        until(lambda: out.read_text() == "one\n", what="the first line")
        with log.open("a") as file:
            file.write("two\nthree")
        until(lambda: out.read_text() == "one\ntwo\n", what="the second line")
        with log.open("a") as file:
            file.write(" is whole\n")
        Journal(run.path, run.run_id).changes([(handle, JobStatus(JobState.DONE))])
        assert following.wait(60) == 0, err.read_text()
    assert out.read_text() == "one\ntwo\nthree is whole\n"


def test_no_run_and_several_are_told_apart(folder):
    assert_refused(dflop("runs", "show", "nowhere", cwd=folder), 2, "no run and no run directory `nowhere`")
    assert_refused(dflop("runs", "show", "demo", cwd=folder), 2, "2 runs begin with `demo`")
    assert_refused(dflop("cancel", "latest", cwd=folder / "runs"), 2, "no runs yet", "where: runs")


def test_cancelling_a_run_without_jobs_says_so_and_the_run_can_be_taken_up(folder):
    run = make_run(folder, "idle", lifecycle.RUNNING)
    for command in (("cancel",), ("runs", "cancel")):
        done = dflop(*command, "idle", cwd=folder)
        assert (done.returncode, done.stdout) == (0, "")
        assert "run idle: 0 jobs cancelled, none remain" in done.stderr
    assert run.state()["state"] == lifecycle.CANCELLED


def test_training_a_finished_run_says_so_and_changes_nothing(folder):
    run = folder / "runs" / "demo-20260101-000000"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = dflop("train", "demo-20260101", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert "is finished, nothing to do" in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not (folder / "store").exists()


def test_training_wants_a_run_or_a_configuration(folder):
    assert_refused(dflop("train", "nowhere.yaml", cwd=folder), 2, "cannot read the configuration")
    refused = dflop("train", "latest", "--set", "train.num_steps=3", cwd=folder)
    assert_refused(refused, 2, "an existing run keeps its configuration", "where: --set")
