"""Jobs on a Slurm cluster, through submitit: its executor and its files, with what they lack.

`executor.py` says how a job gets to Slurm and what is in its batch script, `watcher.py` how Slurm is asked. Why a job
ended is told in the words of its tasks, of srun and of its batch script: Slurm's are fewer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any

from dflop.config import SlurmConfig
from dflop.errors import LaunchError
from dflop.launch.commands import COMMENT, NotNow, scancel
from dflop.launch.executor import MAKE_WAY, Executor, batches
from dflop.launch.job import CHECKPOINTED, JobHandle, JobSpec, JobState, JobStatus, Launcher, make_folder
from dflop.launch.payload import START_LINE, Payload
from dflop.launch.results import BATCH_LOG, DeadTask, collect_values, explain, handle_of, is_done
from dflop.launch.watcher import ON_NODES, Watcher

_DEAD_TASK = re.compile(r"srun: error: (\S+): tasks? (\d+)[\d,-]*[^:]*: (.+)")
_NOT_LAUNCHED = re.compile(r"srun: error: task (\d+) launch failed: (.+)")
_HOW = {"Killed": "died (signal 9)", "Terminated": "died (signal 15)"}
_TOLD_EARLY = "User defined signal 2"
"""How srun calls the end of a task that was told before it could make the signal wait: within its first millisecond."""


class SlurmLauncher(Launcher):
    """Launcher for Slurm; one instance shares one poller (`Watcher`) among all its jobs.

    The run's id goes into the jobs' comment (`dflop:<run_id>`), by which they are found in the queue; `site` is the
    Slurm's dialect. A shared file system may take `results_timeout_s` to show the results of an ended job.

    Raises:
        LaunchError: there is no Slurm on this machine.
    """

    backend = "slurm"

    def __init__(self, *, run_id: str = "", site: SlurmConfig | None = None, results_timeout_s: float = 10.0) -> None:
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                what = f"backend `slurm` needs `{command}`, which is not on PATH"
                raise LaunchError(what, hint="run on a login node of the cluster, or use backend `local`")
        self.comment, self.results_timeout_s = comment_of(run_id), results_timeout_s
        self.site = s = site or SlurmConfig()
        self.watcher = Watcher(poll_interval_s=s.poll_interval_s, lost_after_s=s.lost_after_s)

    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobHandle]:
        """Hand the jobs to sbatch, those of one array name and shape as one array.

        Raises:
            NotNow: nobody answered; jobs before are adopted when these are submitted again.
        """
        handles = dict[int, JobHandle]()
        for group in batches(specs):
            some = [specs[n] for n in group]
            make_folder(some[0].folder)
            try:
                executor = Executor(some, self.site, self.comment)
                jobs = executor.submit_array([Payload(self.backend, spec) for spec in some])
            except LaunchError as error:
                if not isinstance(error, NotNow):
                    with contextlib.suppress(LaunchError):
                        self.cancel(*handles.values())
                raise
            handles |= {n: handle_of(job.paths.submitted_pickle) for n, job in zip(group, jobs, strict=True)}
        self.watcher.note(handles.values())
        return [handles[n] for n in range(len(specs))]

    def poll_all(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        """States from jobs' results if all went well, else from Slurm, which is asked about all of them together.

        Tracebacks say that a job failed only once Slurm says that it has ended: it may be about to start it again.
        """
        done = {handle for handle in handles if is_done(handle)}
        self.watcher.note(done, JobState.DONE)
        others = [handle for handle in handles if handle not in done]
        seen = dict(zip(others, self.watcher.statuses(others) if others else [], strict=True))
        return [JobStatus(JobState.DONE) if h in done else explained(h, seen[h]) for h in handles]

    def cancel(self, *handles: JobHandle) -> None:
        scancel(*(str(handle.id) for handle in self.watcher.not_anothers(handles)))

    def interrupt(self, handle: JobHandle) -> None:
        # The signal reaches the tasks and not the batch script, which goes by a mark and does not start them again.
        try:
            handle.path(MAKE_WAY).touch()
        except OSError as error:
            raise LaunchError(f"cannot signal {handle}: {error.strerror}", where=str(handle.folder)) from error
        for option in ("--state=PENDING", "--signal=USR2"):
            scancel(*(str(job.id) for job in self.watcher.not_anothers([handle])), options=(option,))

    def collect(self, handle: JobHandle) -> list[Any]:
        status, deadline = self.poll(handle), time.monotonic() + self.results_timeout_s
        while status.state is JobState.DONE and not is_done(handle) and time.monotonic() < deadline:
            os.chmod(handle.folder, 0o700)  # makes NFS clients drop their cached listing
            time.sleep(0.2)
        return collect_values(handle, status, first_dead_task(handle))


def comment_of(run_id: str) -> str:
    """By which the jobs of a run are found in the queue: `squeue -o "%i %k"`."""
    return f"{COMMENT}{run_id}"


def first_dead_task(handle: JobHandle) -> DeadTask | None:
    """The first that srun complained about since the job was started last; peers wait long for one that never was."""
    said = _said_since_start(handle)
    if match := _NOT_LAUNCHED.search(said):
        return DeadTask(int(match[1]), f"was not launched ({match[2]}): can its node see {handle.folder}?")
    match = _DEAD_TASK.search(said)
    return DeadTask(int(match[2]), _HOW.get(match[3], match[3]), f" on {match[1]}") if match else None


def explained(handle: JobHandle, status: JobStatus) -> JobStatus:
    """Slurm's status of a job, or what its tasks, srun or its batch script say of its end."""
    if status.state not in (JobState.FAILED, JobState.OOM, JobState.LOST):
        return status
    found = explain(handle, status, dead := first_dead_task(handle))
    if found.state is JobState.FAILED and dead is not None and dead.how == _TOLD_EARLY:
        return JobStatus(JobState.INTERRUPTED, f"{CHECKPOINTED}; it was stopped before it handled signals")
    if found != status or dead is not None or status.state is not JobState.FAILED:
        return found
    # The tasks never began: a line of the script has something to say.
    if text := _said_since_start(handle):
        said = [line for line in text.splitlines() if line.strip() and not line.startswith(START_LINE)]
        return JobStatus(status.state, said[-1]) if said else status
    _, on, nodes = status.reason.rpartition(ON_NODES)
    why = f"it ended before its script began{on}{nodes}: can {nodes if on else 'its node'} see {handle.folder}?"
    return JobStatus(status.state, f"{status.reason}; {why}" if status.reason else why)


def _said_since_start(handle: JobHandle) -> str:
    text = (handle.read(BATCH_LOG) or b"").decode(errors="replace")
    return text[max(0, text.rfind(START_LINE)) :]
