"""Jobs on a Slurm cluster, through submitit: its executor, its watcher and its files, with what they lack.

submitit asks `sacct` alone, shows "no output" of rank 0 where rank 3 left a traceback, and requeues from inside a rank.
`executor.py` says how a job gets to Slurm and what is in its batch script, `watcher.py` how Slurm is asked,
`explain.py` what became of a job.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any

from submitit.slurm.slurm import SlurmJob

from dflop.errors import LaunchError
from dflop.launch.commands import COMMENT, ControllerAway, run_command
from dflop.launch.executor import MAKE_WAY, USUAL_MAX_ARRAY_SIZE, Executor, batches
from dflop.launch.explain import explain, first_dead_task
from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, make_folder
from dflop.launch.payload import Payload
from dflop.launch.results import collect_values, has_all_results, status_from_results
from dflop.launch.site import Site
from dflop.launch.submitted import handle_of
from dflop.launch.watcher import Watcher

_HAS_ENDED = ("Invalid job id", "already completing or completed")
_MAX_IDS = 500
"""Of one scancel."""


class SlurmLauncher:
    """Launcher for Slurm; one instance shares one poller among all its jobs.

    Args:
        run_id: Goes into the job's comment (`dflop:<run_id>`), so that a run's jobs can be found in the queue.
        site: The Slurm's dialect.
        poll_interval_s: Least time between two squeue calls.
        lost_after_s: How long a job may be unknown to Slurm before it is LOST.
        results_timeout_s: How long a shared file system may take to show the results of an ended job.

    Raises:
        LaunchError: there is no Slurm on this machine.
    """

    backend = "slurm"

    def __init__(
        self,
        *,
        run_id: str = "",
        site: Site | None = None,
        poll_interval_s: float = 30.0,
        lost_after_s: float = 120.0,
        results_timeout_s: float = 10.0,
    ) -> None:
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise LaunchError(
                    f"backend `slurm` needs `{command}`, which is not on PATH",
                    hint="run on a login node of the cluster, or use backend `local`",
                )
        self.comment = comment_of(run_id)
        self.site = site or Site()
        self.results_timeout_s = results_timeout_s
        self.watcher = Watcher(poll_interval_s=poll_interval_s, lost_after_s=lost_after_s)

    def submit(self, spec: JobSpec) -> JobHandle:
        """Hand the job to sbatch; leaves `job.sbatch` in the job's folder.

        Raises:
            LaunchError: sbatch refused the job; the message is sbatch's own.
            ControllerAway: nobody answered; it may be submitted again.
        """
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobHandle]:
        """Hand the jobs to sbatch, those of one array name and shape as one array.

        Where a limit of jobs at once is set and an array is too large for one call, each part waits for the one before.

        Raises:
            LaunchError: sbatch refused a job; those before it are cancelled.
            ControllerAway: nobody answered; those before are adopted when the jobs are submitted again.
        """
        handles, last, before = dict[int, JobHandle](), "", ""
        job_class = type("Job", (SlurmJob,), {"watcher": self.watcher})
        for group in batches(specs, max_array_size() if _has_arrays(specs) else 1):
            some = [specs[n] for n in group]
            after = last if self.site.max_jobs_at_once and before and before == some[0].array else ""
            make_folder(some[0].folder)
            try:
                executor = Executor(some, self.site, self.comment, after=after, job_class=job_class)
                jobs = executor.submit_array([Payload(self.backend, spec) for spec in some])
            except ControllerAway:
                raise
            except LaunchError:
                with contextlib.suppress(LaunchError):
                    self.cancel(*handles.values())
                raise
            handles |= {n: handle_of(job.paths.submitted_pickle) for n, job in zip(group, jobs, strict=True)}
            last, before = jobs[0].job_id.partition("_")[0], some[0].array
        self.watcher.submitted(handles.values())
        return [handles[n] for n in range(len(specs))]

    def poll(self, handle: JobHandle) -> JobStatus:
        """State from the job's results if all went well, else from Slurm (see `Watcher`)."""
        return self.poll_all([handle])[0]

    def poll_all(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """The same for several jobs, of which Slurm is asked together.

        Tracebacks say that a job failed only once Slurm says that it has ended: it may be about to start it again.
        """
        done = {h for h in handles if has_all_results(h) and status_from_results(h).state is JobState.DONE}
        self.watcher.forget(done)
        others = [handle for handle in handles if handle not in done]
        seen = dict(zip(others, self.watcher.statuses(others) if others else [], strict=True))
        return [JobStatus(JobState.DONE) if h in done else explain(h, seen[h]) for h in handles]

    def cancel(self, *handles: JobHandle) -> None:
        """Call scancel, which ends all steps of the jobs.

        Raises:
            LaunchError: scancel failed, and not because the jobs have ended.
        """
        for first in range(0, len(handles), _MAX_IDS):
            _scancel(*handles[first : first + _MAX_IDS])

    def interrupt(self, handle: JobHandle) -> None:
        """Call scancel for SIGUSR2, which reaches the tasks and not the batch script; a job in the queue is cancelled.

        A mark keeps the batch script from starting the job again.

        Raises:
            LaunchError: scancel failed, and not because the job has ended, or the mark cannot be left.
        """
        try:
            handle.path(MAKE_WAY).touch()
        except OSError as error:
            raise LaunchError(f"cannot tell {handle} to stop: {error.strerror}", where=str(handle.folder)) from error
        _scancel(handle, options=("--state=PENDING",))
        _scancel(handle, options=("--signal=USR2",))

    def collect(self, handle: JobHandle) -> list[Any]:
        """Return value of every task, by rank.

        Raises:
            Interrupted: the job was told to stop.
            LaunchError: the job failed, was cancelled or is still running.
        """
        status, deadline = self.poll(handle), time.monotonic() + self.results_timeout_s
        while status.state is JobState.DONE and not has_all_results(handle) and time.monotonic() < deadline:
            os.chmod(handle.folder, 0o700)  # makes NFS clients drop their cached listing
            time.sleep(0.2)
        dead = first_dead_task(handle)
        return collect_values(handle, status, ended_by=dead and dead.rank, was_killed=bool(dead and dead.was_killed))


def comment_of(run_id: str) -> str:
    """By which the jobs of a run are found in the queue: `squeue -o "%i %k"`."""
    return f"{COMMENT}{run_id}"


def max_array_size() -> int:
    """Elements that an array may have here; Slurm's default where it does not say."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_command(["scontrol", "show", "config"]).stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else USUAL_MAX_ARRAY_SIZE


def _has_arrays(specs: Sequence[JobSpec]) -> bool:
    named = [spec.array for spec in specs if spec.array]
    return len(set(named)) < len(named)


def _scancel(*handles: JobHandle, options: Sequence[str] = ()) -> None:
    command = ["scancel", *options, *(handle.job_id for handle in handles)]
    done = run_command(command)
    problems = [line for line in done.stderr.splitlines() if line.strip()]
    # Of several jobs each that has ended has a line of its own.
    has_ended = bool(problems) and all(any(ended in line for ended in _HAS_ENDED) for line in problems)
    if done.returncode != 0 and not has_ended:
        names = f"{handles[0]}{f' and {len(handles) - 1} more' if len(handles) > 1 else ''}"
        raise LaunchError(f"scancel of {names} failed: {done.stderr.strip()}", hint=" ".join(command))
