from pathlib import Path

import pytest

from dflop.errors import ConfigError
from dflop.launch import JobState, log_paths
from dflop.run import lifecycle
from dflop.run.driver_lock import drive_alone
from dflop.run.find import all_runs, find_run
from dflop.run.status import RUN_COLUMNS, log_files, run_facts, run_rows
from dflop.train.manifest import VALIDATED
from tests.jobs.made import add_job, begun_at, make_run, save_step


def test_runs_are_told_from_their_directories_alone(tmp_path):
    old = begun_at(make_run(tmp_path, "old", lifecycle.DONE), 1000.0)
    new = begun_at(make_run(tmp_path, "new", lifecycle.RUNNING), 2000.0)
    begun_at(make_run(tmp_path, "new-data", lifecycle.DONE, trains=False), 3000.0)
    begun_at(make_run(tmp_path, "killed-data", lifecycle.RUNNING, trains=False), 500.0)
    save_step(old, 40)
    save_step(new, 12)
    add_job(new, "train", JobState.RUNNING)
    with drive_alone(new, print):
        found = [dict(zip(RUN_COLUMNS, row, strict=True)) for row in run_rows(all_runs(tmp_path / "runs"))]
    assert [(f["run"], f["state"], f["step"], f["num_steps"], f["jobs"]) for f in found] == [
        ("new", "running", 12, 40, "train running (local id-train)"),
        ("old", "done", 40, 40, ""),
        ("killed-data", "abandoned", 0, 40, ""),
    ]
    assert found[0]["driver"].startswith("process ")
    assert found[1]["driver"] == ""
    assert len(run_rows(all_runs(tmp_path / "runs"), everything=True)) == 4
    assert run_rows(all_runs(tmp_path / "nowhere")) == []


def test_the_log_of_training_knows_more_than_its_checkpoints(tmp_path):
    run = make_run(tmp_path, state=lifecycle.RUNNING)
    save_step(run, 10)
    handle = add_job(run, "train", JobState.RUNNING)
    log_paths(handle).stderr.write_text("step 13  14/40 done  loss 3\nstep 14  15/40 done  loss 3\n")
    assert run_facts(run)["step"] == 15
    assert run_facts(run)["state"] == "abandoned", "it is said to run, and nobody drives it"
    add_job(run, "train", JobState.RUNNING, JobState.FAILED, job_id="other")
    assert run_facts(run)["step"] == 15


def test_a_run_has_its_last_and_its_lowest_validation_loss(tmp_path):
    run = make_run(tmp_path, state=lifecycle.RUNNING)
    assert (run_facts(run)["val_loss"], run_facts(run)["best_val_loss"]) == (None, None)
    first, second = add_job(run, "train", JobState.FAILED), add_job(run, "train", JobState.RUNNING, job_id="again")
    line = "validation after step {}: loss {:.4f} over 8 samples in 2 s\n"
    log_paths(first).stderr.write_text(line.format(9, 2.25) + line.format(19, 2.5))
    log_paths(second).stderr.write_text("step 29  30/40 done  loss 3\n" + line.format(29, 2.75))
    assert (run_facts(run)["val_loss"], run_facts(run)["best_val_loss"]) == (2.75, 2.25)
    save_step(run, 30, **{VALIDATED: [2.0, 4, 3]})
    assert (run_facts(run)["val_loss"], run_facts(run)["best_val_loss"]) == (2.75, 2.0)
    save_step(run, 31, **{VALIDATED: ["torn"]})
    assert run_facts(run)["best_val_loss"] == 2.25


def test_logs_are_those_of_the_newest_job_of_a_name(tmp_path):
    run = make_run(tmp_path)
    add_job(run, "data-0", JobState.DONE)
    add_job(run, "train", JobState.FAILED, num_tasks=2)
    again = add_job(run, "train", job_id="again", num_tasks=2)
    view, files = log_files(run, "", 0)
    assert (view.handle, files) == (again, list(log_paths(again)))
    assert log_files(run, "train", 1)[1] == list(log_paths(again, 1))
    assert log_files(run, "id-train", 0)[0].handle.job_id == "id-train"
    with pytest.raises(ConfigError, match="no rank 2"):
        log_files(run, "train", 2)
    with pytest.raises(ConfigError, match="has no job `tran`") as caught:
        log_files(run, "tran", 0)
    assert "did you mean `train`?" in caught.value.hint


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Three runs to train and one for a plan, begun in this order; and a folder that is no run."""
    for at, name in enumerate(("demo-20260101-000000", "demo-20260102-000000", "big-20260103-000000")):
        begun_at(make_run(tmp_path, name), 1000.0 + at)
    begun_at(make_run(tmp_path, "demo-plan-20260104-000000", trains=False), 2000.0)
    (tmp_path / "runs" / "demo-notes").mkdir()
    return tmp_path / "runs"


def test_runs_come_newest_first_and_are_meant_by_their_ids_or_the_beginning_of_them(several, tmp_path, monkeypatch):
    names = ["demo-plan-20260104-000000", "big-20260103-000000", "demo-20260102-000000", "demo-20260101-000000"]
    assert [run.run_id for run in all_runs(several)] == names
    assert all_runs(several / "nowhere") == []
    meant = {"latest": names[1], "big": names[1], "demo-20260101": names[3], names[2]: names[2], "demo-plan": names[0]}
    for name, run_id in meant.items():
        assert find_run(name, several).path == several / run_id
    make_run(tmp_path, f"{names[2]}-2")
    assert find_run(names[2], several).run_id == names[2], "an id that is also a beginning"
    monkeypatch.chdir(tmp_path)
    for folder in (f"runs/{names[1]}", str(several / names[1])):
        assert find_run(folder, Path("elsewhere")).path == several / names[1], "a directory goes before names"
