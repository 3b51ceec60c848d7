"""Cancelling with real jobs of this machine, and with clients of Slurm that are shell scripts."""

import dataclasses
import socket
from pathlib import Path

import pytest

from dflop.errors import Cancelled, LaunchError
from dflop.launch import JobHandle, JobState, Journal
from dflop.launch.local import LocalLauncher
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.driver_lock import drive_alone
from dflop.run.queue import cancel_run, launcher_of, reap
from dflop.steps.follow import refuse_if_cancelled
from tests.jobs.made import add_job, make_run
from tests.launch.helpers import is_gone, make_spec, pids_of_hang, until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflop.run.queue.POLL_S", 0.05)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, state=lifecycle.RUNNING)


def start(run: RunDir, name: str, function: str, *args: str) -> JobHandle:
    """A job of the run, submitted and journalled by a driver that is gone."""
    spec = make_spec(run.job_folder(name), function, *args)
    spec = dataclasses.replace(spec, name=f"{run.run_id}-{name}", key=f"{run.run_id}/{name}")
    handle = LocalLauncher().submit(spec)
    Journal(run.path, run.run_id).submitted(handle)
    return handle


def test_every_job_of_a_run_is_ended_with_all_it_started_and_one_that_does_not_go_is_named(run, tmp_path, monkeypatch):
    done = start(run, "data-0", "report", "x")
    handle = start(run, "train", "hang", str(tmp_path))
    pids = pids_of_hang(tmp_path, 0)
    launcher = launcher_of(run, run.config())
    until(lambda: launcher.poll(done).state.is_final, what="the other job")
    with monkeypatch.context() as patch:
        patch.setattr("dflop.launch.local.LocalLauncher.cancel", lambda *_: None)
        with pytest.raises(LaunchError, match=rf"still running after 0.2 s: small-1-train \({handle.job_id}\)"):
            cancel_run(run, str, limit_s=0.2)
    said: list[str] = []
    assert cancel_run(run, said.append) == [handle.job_id]
    assert all(is_gone(pid) for pid in pids)
    assert said == [f"cancelling job `small-1-train` ({handle.job_id}), running"]
    last = {r.job_id: r.state for r in Journal(run.path, run.run_id).records()}
    assert last == {done.job_id: "done", handle.job_id: "cancelled"}
    assert run.state()["state"] == lifecycle.CANCELLED
    with pytest.raises(Cancelled, match="was cancelled"):
        refuse_if_cancelled(run)


def test_a_finished_run_stays_finished_and_jobs_of_another_machine_are_not_judged(tmp_path):
    run = make_run(tmp_path, state=lifecycle.DONE)
    assert cancel_run(run, str) == []
    assert run.state()["state"] == lifecycle.DONE
    run = make_run(tmp_path, "other", by={"host": f"not-{socket.gethostname()}", "pid": 1})
    with pytest.raises(LaunchError, match="are processes of not-"):
        cancel_run(run, str)
    assert not run.is_cancelled()


def test_its_driver_is_told_of_and_left_to_end(run):
    said: list[str] = []
    with drive_alone(run, print):
        assert cancel_run(run, said.append) == []
        assert "will exit by itself" in said[0]
        assert run.is_cancelled()
        assert run.state()["state"] == lifecycle.RUNNING, "the driver says how it ended"


def test_reaping_spares_runs_that_are_driven_and_says_what_it_would_do(tmp_path):
    orphan, driven = make_run(tmp_path, "orphan", lifecycle.RUNNING), make_run(tmp_path, "driven", lifecycle.RUNNING)
    handles = {}
    for run in (orphan, driven):
        folder = tmp_path / f"of-{run.run_id}"
        folder.mkdir()
        handles[run.run_id] = start(run, "train", "hang", str(folder))
        pids_of_hang(folder, 0)
    launcher = launcher_of(orphan, orphan.config())
    with drive_alone(driven, print):
        for dry_run, expected in ((True, "would be cancelled"), (False, "cancelled")):
            found = reap(tmp_path / "runs", str, dry_run=dry_run)
            assert [(job.run_id, job.job_id, job.state, fate) for job, fate in found] == [
                ("orphan", handles["orphan"].job_id, "running", expected)
            ]
            is_running = launcher.poll(handles["orphan"]).state is JobState.RUNNING
            assert is_running == dry_run
        assert launcher.poll(handles["driven"]).state is JobState.RUNNING
        assert reap(tmp_path / "runs", str) == []
    assert orphan.state()["state"] == lifecycle.CANCELLED
    cancel_run(driven, str)


SQUEUE = "#!/bin/sh\ncat {queue}\n"
SCANCEL = """#!/bin/sh
echo "$@" >> {log}
for id in "$@"; do
  awk -F'\037' -v id="$id" '$1 != id' {queue} > {queue}.new; mv {queue}.new {queue}
done
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm as it looks from here: a file with what squeue prints, out of which scancel takes lines."""
    folder, queue = tmp_path / "bin", tmp_path / "queue"
    folder.mkdir()
    queue.write_text("")
    for name, text in (("squeue", SQUEUE), ("scancel", SCANCEL), ("sbatch", "#!/bin/sh\nexit 1\n")):
        (folder / name).write_text(text.format(queue=queue, log=tmp_path / "scancelled"))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return queue


SLURM = ("cluster.backend=slurm", "cluster.hardware=test", "cluster.device=cpu")


def test_on_slurm_the_queue_is_the_truth_and_empty_afterwards(tmp_path, queue):
    run = make_run(tmp_path, "slurm-1", lifecycle.RUNNING, *SLURM)
    add_job(run, "train", JobState.RUNNING, job_id="7", backend="slurm")
    script = run.job_folder("train") / "0" / "job.sbatch"
    lines = (
        f"7|RUNNING|{script}|dflop:slurm-1|slurm-1-train",
        "8_[0-3]|PENDING|/var/spool/a copy|dflop:slurm-1|slurm-1-data, which no journal knows",
        f"12|PENDING|{script}|(null)|proj42, of a site that writes its own comments",
        f"14|PENDING|{run.job_folder('train')}/by_hand/job.sbatch|(null)|that a person has submitted",
        "9|RUNNING|/tmp/x|dflop:slurm-10|another run",
        "10|RUNNING|/tmp/x|(null)|nobody else",
        f"11|COMPLETING|{script}|dflop:slurm-1|slurm-1-data",
        "13|RUNNING|/elsewhere/runs/slurm-1/jobs/train/0/job.sbatch|dflop:slurm-1|a run of the same name",
    )
    queue.write_text("".join(f"{line}\n" for line in lines).replace("|", "\x1f"))
    assert cancel_run(run, str) == ["7", "8_[0-3]", "12", "14"]
    assert (tmp_path / "scancelled").read_text() == "7 8_[0-3] 12 14\n", "one command, and no more"
    assert [line.split("\x1f")[0] for line in queue.read_text().splitlines()] == ["9", "10", "11", "13"]
    assert run.state()["state"] == lifecycle.CANCELLED


def test_reaping_a_queue_leaves_what_it_cannot_judge_and_fails_where_it_does_not_answer(tmp_path, queue):
    run = make_run(tmp_path, "slurm-1", lifecycle.RUNNING, *SLURM)
    (make_run(tmp_path, "slurm-2", lifecycle.RUNNING, *SLURM).path / "jobs.jsonl").write_text("{half}\n")
    broken = make_run(tmp_path, "slurm-3", lifecycle.RUNNING, *SLURM, backend="")
    broken.config_file.write_text("{half")
    lines = "7|RUNNING|/x|dflop:slurm-1|slurm-1-train\n9|PENDING|/x|dflop:elsewhere|e\n"
    queue.write_text(lines.replace("|", "\x1f"))
    damaged: list[str] = []
    found = reap(tmp_path / "runs", damaged.append)
    assert [line.split(":")[0] for line in damaged[:2]] == ["run slurm-3", "run slurm-2"], "and they hide no other"
    assert [(job.job_id, job.state, fate.split(":")[0]) for job, fate in found] == [
        ("7", "running", "cancelled"),
        ("9", "pending", "skipped"),
    ]
    assert queue.read_text().startswith("9\x1f")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="`squeue` failed: slurm_load_jobs error"):
        cancel_run(run, str)
    said: list[str] = []
    with pytest.raises(LaunchError):
        reap(tmp_path / "runs", said.append)
    assert any("run slurm-1: `squeue` failed" in line for line in said)
