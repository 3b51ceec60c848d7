"""The jobs of a run: their launcher, those that have not ended, and how a run is cancelled and what is orphaned reaped.

Cancelling leaves a mark in the run directory first, so that a driver that lives, on whatever node, submits nothing
more; it ends when it sees its job cancelled. On Slurm the queue itself is asked for jobs, by their scripts: a driver
that was killed between sbatch and journal leaves a job that only the queue knows. On this machine the journal knows
all of them. Afterwards the queue is provably empty.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflop.config import Config, SlurmConfig
from dflop.errors import Cancelled, DflopError, LaunchError
from dflop.launch import Change, JobHandle, Journal, Launcher, Noted, standing
from dflop.launch.commands import COMMENT, rows_of_queue, scancel
from dflop.launch.job import BY_HAND, SCRIPT, JobId
from dflop.launch.process import processes_where
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of
from dflop.run.find import all_runs
from dflop.run.messages import Say

LIMIT_S = 60.0
"""For jobs to leave the queue; Slurm gives a job KillWait (30 s by default) to end."""
POLL_S = 1.0
DRIVER_VARIABLE = "DFLOP_DRIVER"
"""In the environment of whatever a driver starts, its pid."""
_SERVER = "prefect.server.api.server:create_app"
_SCRIPT = rf"(/.+)/jobs/[^/]+/(?:\d+|{BY_HAND})/{re.escape(SCRIPT)}"
"""Batch scripts of runs, after the run directory."""


def launcher_of(run: RunDir, config: Config) -> Launcher:
    """The launcher of the run's cluster, with the dialect that the configuration gives its Slurm."""
    if config.cluster.backend == "slurm":
        from dflop.launch.slurm import SlurmLauncher  # submitit takes a tenth of a second

        return SlurmLauncher(run_id=run.run_id, site=site_of(run, config))
    from dflop.launch.local import LocalLauncher

    return LocalLauncher()


def site_of(run: RunDir, config: Config) -> SlurmConfig:
    """The dialect of the cluster's Slurm; a container sees runs, store and dataset where they are."""
    s, d, box = config.cluster.slurm, config.dataset, config.cluster.slurm.container
    if box is None:
        return s
    files = [d.annotations, d.tokenizer, *([config.model.weights] if config.model.weights else [])]
    folders = [run.path.parent, config.store, d.media_root, *(file.parent for file in files)]
    mounts = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *box.mounts])
    return s.model_copy(update={"container": box.model_copy(update={"mounts": tuple(mounts)})})


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that has not ended."""

    job_id: str
    """The id; of an array that waits as a whole, `12_[0-3]`."""
    run_id: str
    state: str
    """In the words of its scheduler, small."""
    name: str
    run_path: str = ""
    """Run directory, as the job's script says; empty: it does not say."""

    def is_of(self, run: RunDir) -> bool:
        """By its script, which nobody can change; by its comment where it was submitted from elsewhere."""
        return self.run_id == run.run_id and self.run_path in ("", str(run.path.absolute()))


def jobs_in_queue(clusters: Collection[str] = ()) -> list[QueuedJob]:
    """Jobs of this user that dflop has submitted, to the given Slurm clusters, and that have not ended.

    Raises:
        LaunchError: squeue does not answer.
    """
    found = []
    for cluster in sorted({*clusters}) or [""]:
        for number, state, script, comment, name in rows_of_queue(cluster):
            ours, job_id = re.fullmatch(_SCRIPT, script), str(JobId(cluster, number, 0.0))
            if ours is not None:
                found.append(QueuedJob(job_id, os.path.basename(ours[1]), state.lower(), name, ours[1]))
            elif comment.startswith(COMMENT):
                found.append(QueuedJob(job_id, comment.removeprefix(COMMENT), state.lower(), name))
    return found


def jobs_of(run: RunDir) -> list[Noted]:
    """Jobs of a run that are noted, in the order of their submission."""
    return list(Journal(run.path, run.run_id).jobs().values())


def live_jobs(run: RunDir, launcher: Launcher) -> list[Change]:
    """Jobs of a run that have not ended, whoever submitted them; ends that nobody saw are noted in the journal."""
    journal = Journal(run.path, run.run_id)
    noted, found = journal.jobs(), standing(launcher, journal, [run.path / "jobs"])
    journal.changes([(handle, status) for handle, status in found if status.state.is_final and handle.id in noted])
    return [(handle, status) for handle, status in found if not status.state.is_final]


def is_over(run: RunDir, handle: JobHandle | None) -> bool:
    """Whether a job has ended, by the journal, which its driver keeps; without a driver, by asking for it.

    None stands for what runs beside the jobs, and ends when no job is left.
    """
    ended = {job.handle: job.state.is_final for job in jobs_of(run)}
    if handle is None:
        return all(ended.values())
    if ended.get(handle, True):
        return True
    return driver_of(run) is None and handle not in {h for h, _ in live_jobs(run, launcher_of(run, run.config()))}


def backend_of(run: RunDir) -> str:
    """Where the jobs of a run run."""
    return str(run.state().get("backend") or run.config().cluster.backend)


def check_reach(run: RunDir) -> None:
    """Refuse to judge jobs that are processes of another machine.

    Raises:
        LaunchError: the run's jobs are, and its driver was on that machine.
    """
    host = run.state().get("by", {}).get("host", "")
    if backend_of(run) != "slurm" and host not in ("", socket.gethostname()):
        what = f"the jobs of run `{run.run_id}` are processes of {host}"
        raise LaunchError(what, where=str(run.path), hint=f"run it on {host}")


def as_cancelled(run: RunDir, because: str = "") -> Cancelled:
    """The error of a driver whose run was cancelled; `because` is how it noticed."""
    return Cancelled(
        f"run `{run.run_id}` was cancelled{f': {because}' if because else ''}",
        where=str(run.path),
        hint="dflop run, or dflop train, resumes it",
    )


def cancel_run(run: RunDir, say: Say, *, limit_s: float = LIMIT_S) -> list[str]:
    """Cancel every job of a run, wait until none is left, and return their ids; whether it has a driver or not.

    Raises:
        LaunchError: jobs are left after `limit_s`, or are processes of another machine.
    """
    check_reach(run)
    run.mark_cancelled(True)
    told, deadline_s = dict[str, str](), time.monotonic() + limit_s
    while jobs := _remaining(run):
        if time.monotonic() >= deadline_s:
            left = f"still running after {limit_s:g} s: {', '.join(f'{job.name} ({job.job_id})' for job in jobs)}"
            raise LaunchError(left, where=str(run.path), hint="run dflop cancel again")
        for job in jobs:
            if job.job_id not in told:
                told[job.job_id] = job.name
                say(f"cancelling job `{job.name}` ({job.job_id}), {job.state}")
        if backend_of(run) == "slurm":
            scancel(*(job.job_id for job in jobs))
        else:
            launcher = launcher_of(run, run.config())
            launcher.cancel(*(handle for handle, _ in live_jobs(run, launcher)))
        time.sleep(POLL_S)
    driver = driver_of(run)
    if driver is not None:
        say(f"{driver} will exit by itself and submits nothing more")
    elif run.state().get("state") != lifecycle.DONE:
        lifecycle.note(run, lifecycle.CANCELLED)
    return list(told)


def _remaining(run: RunDir) -> list[QueuedJob]:
    """Jobs of a run that have not ended and are not about to."""
    if backend_of(run) == "slurm":
        return [job for job in jobs_in_queue(_clusters(run)) if job.is_of(run) and job.state != "completing"]
    live = live_jobs(run, launcher_of(run, run.config()))
    return [QueuedJob(handle.job_id, run.run_id, status.state.value, handle.name) for handle, status in live]


def _clusters(run: RunDir) -> set[str]:
    """Slurm clusters that accepted jobs of a run."""
    return {job.handle.cluster for job in jobs_of(run)}


def reap(folder: Path, say: Say, *, dry_run: bool = False) -> list[tuple[QueuedJob, str]]:
    """Cancel the jobs of runs in a folder that nobody drives; returns each, and what became of it, or would.

    A run that is taken up again adopts its jobs, so this is for runs that nobody means to take up. Jobs in the queue
    whose run is not in the folder are told of and left alone.
    """
    known = all_runs(folder)
    fate = "would be cancelled" if dry_run else "cancelled"
    found = [(job, fate) for run in known if driver_of(run) is None for job in _reap_run(run, say, dry_run)]
    clusters, on_slurm = set[str](), list[RunDir]()
    for run in known:
        with contextlib.suppress(DflopError):  # a damaged run was reported above
            if backend_of(run) == "slurm":
                clusters |= _clusters(run)
                on_slurm.append(run)
    if on_slurm:
        queued = jobs_in_queue(clusters)
        strangers = [job for job in queued if not any(job.is_of(run) for run in known)]
        found += [(job, f"skipped: its run is not in {folder}") for job in strangers]
    return found


def _reap_run(run: RunDir, say: Say, dry_run: bool) -> list[QueuedJob]:
    try:
        if backend_of(run) != "slurm" and all(job.state.is_final for job in jobs_of(run)):
            return []
        check_reach(run)
        orphans = _remaining(run)
        if orphans and not dry_run:
            cancel_run(run, say)
    except DflopError as error:
        say(f"run {run.run_id}: {error.what}")
        return []
    return orphans


def servers_left_behind() -> set[psutil.Process]:
    """Temporary Prefect servers of this user whose driver was killed with -9; what they kept is in their database."""
    return processes_where(_is_left_behind)


def _is_left_behind(process: psutil.Process) -> bool:
    if _SERVER not in process.cmdline():
        return False
    driver = process.environ().get(DRIVER_VARIABLE, "")
    return driver.isdecimal() and not psutil.pid_exists(int(driver))
