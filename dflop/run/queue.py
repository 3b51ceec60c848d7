"""The launcher of a run's jobs, and what the cluster's queue and the journal know of those that have not ended."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass

from dflop.config import Config, SlurmConfig
from dflop.errors import LaunchError
from dflop.launch import Change, JobHandle, Journal, Launcher, Noted, standing
from dflop.launch.commands import COMMENT, rows_of_queue
from dflop.launch.job import BY_HAND, SCRIPT, JobId
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of

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
    """Of an array that waits as a whole, `12_[0-3]`."""
    run_id: str
    state: str
    """In the words of its scheduler, small."""
    name: str
    run_path: str = ""
    """Its run directory, as its script says; empty: it does not say."""

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
    """Jobs of a run that have not ended, whoever submitted them; ends that nobody saw are noted in the journal.

    Jobs that a person submitted are in their folders only, until a driver notes them.
    """
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
