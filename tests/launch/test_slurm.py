"""The Slurm launcher against a Slurm that is none (`fake_slurm.py`): batch scripts run, nobody needs root.

tests/slurm has the same on a real one.
"""

import dataclasses
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.core.utils import JobPaths

from dflop.config import SlurmConfig
from dflop.errors import Interrupted, LaunchError
from dflop.launch import JobState, JobStatus, Journal, Resources, adopt_or_submit_all, log_paths
from dflop.launch.commands import NotNow
from dflop.launch.results import submitted_in
from dflop.launch.slurm import SlurmLauncher
from dflop.launch.watcher import Watcher
from tests.launch import fake_slurm
from tests.launch.helpers import end, live, make_spec, run_job, until

TWO = Resources(tasks_per_node=2, time_limit_min=5)
HELD = Resources(extra={"hold": ""})
"""Of jobs that only have to be in the queue."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the cluster's state; its clients are first on PATH."""
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{fake_slurm.install(folder)}:{os.environ['PATH']}")
    yield folder
    for answer in ("down", "cluster"):
        (folder / answer).unlink(missing_ok=True)
    subprocess.run([folder / "bin" / "scancel", *os.listdir(folder / "jobs")], capture_output=True, check=True)


@pytest.fixture
def launcher(slurm: Path) -> SlurmLauncher:
    return make_launcher(slurm)


def make_launcher(slurm: Path, **site: object) -> SlurmLauncher:
    """Its watcher asks often, hence without a process each time."""
    launcher = SlurmLauncher(run_id="r1", site=SlurmConfig(**site), results_timeout_s=5)
    launcher.watcher = Watcher(poll_interval_s=0.1, lost_after_s=1, command=lambda args: fake_slurm.answer(slurm, args))
    return launcher


def calls(slurm: Path, client: str) -> list[dict]:
    path = slurm / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [call for line in lines if client in (call := json.loads(line))]


def test_without_slurm_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="`sbatch`, which is not on PATH"):
        SlurmLauncher()


def test_one_job_returns_its_values_and_its_saved_script_does_the_same_by_hand(launcher, slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # as inside another job
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:secret")
    resources = dataclasses.replace(TWO, setup=('export GREETING="$GREETING and more"',))
    handle = launcher.submit(
        make_spec(tmp_path / "job", "report", "hello", resources=resources, env={"GREETING": "it's $HOME"})
    )
    assert end(launcher, handle).state is JobState.DONE
    seen = launcher.collect(handle)
    assert [(s["word"], s["RANK"], s["WORLD_SIZE"], s["GREETING"]) for s in seen] == [
        ("hello", "0", "2", "it's $HOME and more"),
        ("hello", "1", "2", "it's $HOME and more"),
    ]
    assert "rank 1 says hello" in log_paths(handle, 1).stdout.read_text()
    assert stat.S_IMODE(handle.folder.stat().st_mode) == 0o700
    (call,) = calls(slurm, "sbatch")
    assert not {"SLURM_CPUS_PER_TASK", "PREFECT_API_AUTH_STRING"} & {*call["environment"]}
    saved = handle.folder / "job.sbatch"
    assert f'again="{handle.job_id}${{element}}_submitted.pkl"' in saved.read_text().splitlines()
    done = subprocess.run(["sbatch", "--parsable", saved], capture_output=True, text=True, check=True)
    by_hand = dataclasses.replace(handle, job_id=done.stdout.strip())
    assert end(launcher, by_hand).state is JobState.DONE
    assert launcher.collect(by_hand)[0]["word"] == "hello"
    until(lambda: by_hand.read("exit"), what="the exit file")
    assert [h.job_id for h in submitted_in([handle.folder], [handle])] == ["102"]


def test_a_part_that_is_refused_takes_back_those_before_it(slurm, launcher, tmp_path):
    good = make_spec(tmp_path / "good", "report", "x", resources=HELD)
    bad = make_spec(tmp_path / "bad", "report", "x", resources=Resources(partition="nowhere"))
    with pytest.raises(LaunchError, match="invalid partition specified: nowhere") as caught:
        launcher.submit_all([good, bad])
    assert caught.value.where == str(tmp_path / "bad" / "0" / "job.sbatch")
    with fake_slurm.Jobs(slurm) as jobs:
        (job,) = jobs.values()
    assert job["state"] == "CANCELLED"


def test_a_refusal_of_memory_names_the_setting(slurm, launcher, tmp_path):
    (slurm / "no_memory").touch()
    spec = make_spec(tmp_path / "job", "report", "x", resources=Resources(memory_bytes=1 << 30))
    with pytest.raises(LaunchError, match="Memory specification") as caught:
        launcher.submit(spec)
    assert "cluster.slurm.ask_for_memory: false" in caught.value.hint
    assert (tmp_path / "job" / "0" / "job.sbatch").exists()
    assert submitted_in([tmp_path / "job"], []) == []
    (slurm / "no_memory").unlink()
    assert launcher.submit(spec).folder == tmp_path / "job" / "0", "the next submission uses the folder"


def test_a_limit_on_submitted_jobs_passes_and_others_do_not(slurm, launcher, tmp_path):
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    for reason, kind, hint in (
        ("QOSMaxSubmitJobPerUserLimit", NotNow, "check data_profile.num_shards: fewer, larger jobs"),
        ("AssocMaxSubmitJobLimit", NotNow, "check data_profile.num_shards: fewer, larger jobs"),
        ("QOSMaxWallDurationPerJobLimit", LaunchError, "check cluster.slurm.time_limit_min"),
        ("QOSMaxGRESPerUser", LaunchError, "check cluster.num_nodes, cluster.num_processes_per_node: request fewer"),
        ("QOSMaxCpuPerUserLimit", LaunchError, "check cluster.num_nodes, cluster.num_processes_per_node"),
        ("", LaunchError, "check cluster.slurm.time_limit_min, cluster.num_nodes, data_profile.num_shards against"),
    ):
        (slurm / "refuse").write_text(f"sbatch: error: {reason}\nsbatch: error: Batch job submission failed: {policy}")
        with pytest.raises(LaunchError) as caught:
            launcher.submit(make_spec(tmp_path / "job", "report", "x"))
        assert (type(caught.value), caught.value.hint[: len(hint)]) == (kind, hint)


@pytest.mark.parametrize("array", ["", "r1"])
def test_a_job_that_sbatch_accepted_without_an_answer_is_found_and_not_submitted_twice(slurm, tmp_path, array):
    launcher, journal = make_launcher(slurm), Journal(tmp_path / "run", "r1")
    specs = [
        make_spec(tmp_path / "job", "report", key, name=f"r1-{key}", key=key, array=array, resources=HELD)
        for key in (("a", "b") if array else ("a",))
    ]
    (slurm / "late").touch()
    with pytest.raises(NotNow, match="Socket timed out"):
        adopt_or_submit_all(launcher, specs, journal)
    (slurm / "late").unlink()
    handles = adopt_or_submit_all(launcher, specs, journal)
    assert [h.job_id for h in handles] == (["101_0", "101_1"] if array else ["101"])
    assert {launcher.poll(h).state for h in handles} == {JobState.QUEUED}
    assert len(calls(slurm, "sbatch")) == 1


def test_one_that_waits_with_another_request_is_ended_and_not_given_the_work(slurm, tmp_path):
    """The driver died, and the next one has another plan."""
    launcher, journal = make_launcher(slurm), Journal(tmp_path / "run", "r1")
    (slurm / "late").touch()
    with pytest.raises(NotNow):
        adopt_or_submit_all(launcher, [make_spec(tmp_path / "job", "report", "a", resources=HELD)], journal)
    (slurm / "late").unlink()
    spec = make_spec(tmp_path / "job", "report", "a", resources=dataclasses.replace(HELD, tasks_per_node=2))
    (handle,) = adopt_or_submit_all(launcher, [spec], journal)
    with fake_slurm.Jobs(slurm) as jobs:
        assert {job_id: job["state"] for job_id, job in jobs.items()} == {"101": "CANCELLED", "102": "PENDING"}
    assert handle.job_id == "102"


def test_a_job_of_another_cluster_is_followed_adopted_and_cancelled_there(slurm, launcher, tmp_path):
    """SLURM_CLUSTERS is set for sbatch alone: another shell adopts and cancels."""
    (slurm / "cluster").write_text("c2")
    spec, journal = make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate")), Journal(tmp_path / "run", "r1")
    (handle,) = adopt_or_submit_all(launcher, [spec], journal)
    assert (str(handle.id), [r.job_id for r in journal.records()]) == ("101;c2", ["101;c2"])
    assert submitted_in([tmp_path / "job"], []) == [handle], "its folder knows the cluster, too"
    later = make_launcher(slurm)
    assert adopt_or_submit_all(later, [spec], Journal(tmp_path / "run", "r1")) == [handle]
    until(lambda: later.poll(handle).state is JobState.RUNNING, what="the job to run")
    later.cancel(handle)
    assert end(later, handle).state is JobState.CANCELLED


def test_one_that_has_begun_without_its_work_is_ended_first(slurm, launcher, tmp_path):
    spec = make_spec(tmp_path / "job", "report", "x")
    (slurm / "late").touch()
    with pytest.raises(NotNow):
        launcher.submit(spec)
    (slurm / "late").unlink()
    handle = launcher.submit(spec)
    with fake_slurm.Jobs(slurm) as jobs:
        assert (handle.job_id, jobs["101"]["state"]) == ("102", "CANCELLED")
    assert end(launcher, handle).state is JobState.DONE


def test_a_controller_that_is_away_refuses_nothing_and_what_it_took_before_is_adopted(slurm, launcher, tmp_path):
    specs = [make_spec(tmp_path / name, "report", "x", key=name, resources=HELD) for name in "ab"]
    first = launcher.submit(specs[0])
    (slurm / "down").touch()
    journal = Journal(tmp_path / "run", "r1")
    with pytest.raises(NotNow, match="Slurm's controller does not respond"):
        adopt_or_submit_all(launcher, specs, journal)
    (slurm / "down").unlink()
    assert adopt_or_submit_all(launcher, specs, journal)[0] == first
    assert [h.job_id for h in adopt_or_submit_all(launcher, specs, journal)] == ["101", "102"]


def test_a_setup_line_that_fails_ends_the_job_and_is_named(launcher, tmp_path):
    resources = Resources(setup=("export GREETING=hi", "no-such-command --load", "export GREETING=ho"))
    handle = launcher.submit(make_spec(tmp_path / "job", "report", "x", resources=resources))
    assert end(launcher, handle).reason == "dflop: a setup line of the cluster file failed: no-such-command --load"
    with pytest.raises(LaunchError, match="command not found"):
        launcher.collect(handle)


def test_a_job_goes_on_under_its_id_until_it_is_done(launcher, slurm, tmp_path):
    spec = make_spec(tmp_path / "job", "work_on", str(tmp_path), "20", "10", is_resumable=True)
    seen: list[str] = []
    journal = Journal(tmp_path / "run", "r1")
    assert run_job(launcher, spec, journal, on_changes=lambda changes: seen.extend(str(s) for _, s in changes)) == [20]
    (job_id,) = {r.job_id for r in journal.records()}
    assert len(calls(slurm, "sbatch")) == 1
    assert (tmp_path / "job" / "0" / f"{job_id}_stops").read_text() == "0 10\n10 20\n"
    assert (tmp_path / "job" / "0" / f"{job_id}_batch.log").read_text().count("dflop: start ") == 3
    assert seen[-1] == "done"


def test_a_job_that_gets_nowhere_is_started_three_times(launcher, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "work_on", str(tmp_path), "30", "0", is_resumable=True))
    assert handle.job_id == "101"
    found = end(launcher, handle)
    assert found.state is JobState.INTERRUPTED
    assert "stopped 3 times without progress" in found.reason
    assert handle.path("stops").read_text() == "0 0\n" * 3
    with pytest.raises(Interrupted):
        launcher.collect(handle)


def test_where_nothing_is_requeued_the_driver_is_told(launcher, slurm, tmp_path):
    (slurm / "no_requeue").touch()
    spec = make_spec(tmp_path / "job", "work_on", str(tmp_path), "10", "10", is_resumable=True)
    journal = Journal(tmp_path / "run", "r1")
    with pytest.raises(Interrupted, match="its state is on disk"):
        run_job(launcher, spec, journal)
    assert run_job(launcher, spec, journal) == [10]
    assert len(calls(slurm, "sbatch")) == 2


def test_a_job_id_that_comes_again_is_another_job(launcher, slurm, tmp_path):
    """A controller that lost its state gives the id of a job that is done and noted to the same work a moment later."""
    spec, journal = make_spec(tmp_path / "job", "report", "x"), Journal(tmp_path / "run", "r1")
    (before,) = adopt_or_submit_all(launcher, [spec], journal)
    end(launcher, before)
    assert adopt_or_submit_all(launcher, [spec], journal) == [before], "it ended unseen"
    journal.changes([(before, launcher.poll(before))])
    until(lambda: fake_slurm.answer(slurm, ["squeue"]).stdout == "", what="the job to leave the queue")
    (slurm / "jobs" / "101").unlink()
    (now,) = adopt_or_submit_all(launcher, [dataclasses.replace(spec, resources=HELD)], journal)
    assert (now.job_id, now == before) == ("101", False)
    assert launcher.poll(now).state is JobState.QUEUED, "it has no results"
    assert launcher.collect(before)[0]["word"] == "x"
    assert live(journal, spec.key) == now


@pytest.mark.parametrize("change", ["name", "comment", "partition"])
def test_a_job_that_somebody_changes_while_it_waits_and_runs_is_still_the_job(launcher, slurm, tmp_path, change):
    gate = tmp_path / "gate"
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(gate)))
    subprocess.run(["scontrol", "update", f"jobid={handle.job_id}", f"{change}=proj42"], check=True)
    until(lambda: launcher.poll(handle).state is JobState.RUNNING, what="the job to run")
    later = make_launcher(slurm)
    assert adopt_or_submit_all(later, [make_spec(tmp_path / "job", "wait_for", str(gate))], Journal(tmp_path, "r")) == [
        handle
    ]
    gate.touch()
    assert end(later, handle).state is JobState.DONE


def test_a_job_that_was_lost_is_ended_before_another_one_is_submitted(launcher, slurm, tmp_path):
    """The controller had forgotten it, and knows it again by now."""
    spec, journal = make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate")), Journal(tmp_path / "run", "r1")
    (first,) = adopt_or_submit_all(launcher, [spec], journal)
    journal.changes([(first, JobStatus(JobState.LOST))])
    (second,) = adopt_or_submit_all(launcher, [spec], journal)
    with fake_slurm.Jobs(slurm) as jobs:
        states = {job_id: job["state"] for job_id, job in jobs.items()}
    assert (states[first.job_id], states[second.job_id]) == ("CANCELLED", "RUNNING")
    (tmp_path / "gate").touch()
    assert end(launcher, second).state is JobState.DONE


def test_a_lost_job_whose_end_nobody_confirms_is_not_submitted_again(launcher, slurm, tmp_path):
    spec, journal = make_spec(tmp_path / "job", "report", "x", resources=HELD), Journal(tmp_path / "run", "r1")
    (first,) = adopt_or_submit_all(launcher, [spec], journal)
    journal.changes([(first, JobStatus(JobState.LOST))])
    (slurm / "down").touch()
    with pytest.raises(NotNow, match=f"scancel of job {first.job_id} failed"):
        adopt_or_submit_all(launcher, [spec], journal)
    assert len(calls(slurm, "sbatch")) == 1


def test_of_a_driver_that_died_before_it_knew_the_id_the_job_ends_by_itself(launcher, tmp_path, monkeypatch):
    spec, journal = make_spec(tmp_path / "job", "report", "x"), Journal(tmp_path / "run", "r1")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JobPaths, "move_temporary_file", die)
        with pytest.raises(KeyboardInterrupt):
            launcher.submit(spec)
    (handle,) = adopt_or_submit_all(launcher, [spec], journal)
    assert handle.job_id == "102"
    assert end(launcher, handle).state is JobState.DONE
    assert not (tmp_path / "job" / "0" / "101_submitted.pkl").exists(), "it waits for what never comes"


def test_a_queue_that_is_silent_is_said_and_nothing_is_lost(launcher, slurm, tmp_path):
    handle = launcher.submit(make_spec(tmp_path / "job", "wait_for", str(tmp_path / "gate")))
    until(lambda: launcher.poll(handle).state is JobState.RUNNING, what="the job to run")
    (slurm / "down").touch()
    until(lambda: "squeue has not responded since" in launcher.poll(handle).reason, what="silence to be said")
    assert launcher.poll(handle).state is JobState.RUNNING
    (tmp_path / "gate").touch()
    assert end(launcher, handle).state is JobState.DONE, "results speak for themselves"


def test_jobs_that_were_submitted_and_never_noted_are_adopted(launcher, slurm, tmp_path):
    """Their driver died in between; of an array, those are adopted that live or are done."""
    specs = [
        make_spec(tmp_path / "job", *what, name=f"r1-{key}", key=key, array="r1", resources=TWO)
        for key, what in (("a", ("wait_for", str(tmp_path / "gate"))), ("b", ("report", "x")), ("c", ("fail_on", "0")))
    ]
    unnoted = launcher.submit_all(specs)
    assert len(calls(slurm, "sbatch")) == 1
    for handle in unnoted[1:]:
        end(launcher, handle)
    journal, later = Journal(tmp_path / "run", "r1"), make_launcher(slurm)
    handles = adopt_or_submit_all(later, specs, journal)
    assert [h == before for h, before in zip(handles, unnoted, strict=True)] == [True, True, False]
    assert [(h.name, h.key, h.num_tasks) for h in handles] == [(s.name, s.key, s.num_tasks) for s in unnoted]
    assert [h.folder.name for h in handles] == ["0", "0", "1"]
    assert {r.job_id for r in journal.records()} == {h.job_id for h in (*handles, unnoted[2])}
    assert adopt_or_submit_all(later, specs[:2], journal) == handles[:2]
    (tmp_path / "gate").touch()
    assert end(later, handles[0]).state is JobState.DONE
    assert later.collect(handles[1])[0]["word"] == "x"
