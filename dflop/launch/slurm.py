"""Jobs on a Slurm cluster: submitit writes and submits the batch script, our own watcher follows the job.

submitit alone waits for ever where `sacct` does not work, and shows "no output" of rank 0 where rank 3 left a
traceback. The batch script is saved as `job.sbatch`; submitting it again by hand does the same work. `srun` stays,
because only it passes SIGUSR2 on to the tasks, with --kill-on-bad-exit, or the peers of a dead rank would hang until
the time limit. GPU options are left out at zero: clusters without GPUs refuse even `--gpus-per-node=0`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from dflop.errors import Interrupted, LaunchError
from dflop.launch.job import CHECKPOINTED, JobHandle, JobSpec, JobState, JobStatus, log_paths, make_folder
from dflop.launch.payload import Payload, thread_environment
from dflop.launch.results import collect_values, first_error, has_all_results, read_results, status_from_results
from dflop.launch.watch import SlurmWatcher, run_command

_DEAF = """sh -c 'trap "" USR2; exec "$@"' sh"""
"""Starts a command that ignores SIGUSR2 until it asks for it; by default it would be killed."""
_STOPPED = f"Exited with exit code {Interrupted.exit_code}"
_HAS_ENDED = ("Invalid job id", "already completing or completed")
_DEAD_TASK = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+)[^:]*: (?P<how>.+)")


class SlurmLauncher:
    """Launcher for Slurm; one instance shares one poller among all its jobs.

    Args:
        run_id: Goes into the job's comment (`dflop:<run_id>`), so that a run's jobs can be found in the queue.
        poll_interval_s: Least time between two squeue calls.
        lost_after_s: How long a job may be unknown to Slurm before it is LOST.
        signal_delay_s: How long before the time limit the tasks get SIGUSR2.
        results_timeout_s: How long a shared file system may take to show the results of an ended job.
        srun_args: Further options of srun (`--cpu-bind=none`).
        python: Command that starts Python on the node, where it is not this interpreter (a container).

    Raises:
        LaunchError: there is no Slurm on this machine.
    """

    backend = "slurm"

    def __init__(
        self,
        *,
        run_id: str = "",
        poll_interval_s: float = 30.0,
        lost_after_s: float = 120.0,
        signal_delay_s: int = 90,
        results_timeout_s: float = 10.0,
        srun_args: tuple[str, ...] = (),
        python: str | None = None,
    ) -> None:
        for command in ("sbatch", "srun", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise LaunchError(
                    f"backend `slurm` needs `{command}`, which is not on PATH",
                    hint="run on a login node of the cluster, or use backend `local`",
                )
        self.run_id = run_id
        self.signal_delay_s = signal_delay_s
        self.results_timeout_s = results_timeout_s
        self.srun_args = srun_args
        self.python = python
        self.watcher = SlurmWatcher(poll_interval_s=poll_interval_s, lost_after_s=lost_after_s)

    def submit(self, spec: JobSpec) -> JobHandle:
        """Hand the job to sbatch; leaves `job.sbatch` and `payload.pkl` in the job's folder.

        Raises:
            LaunchError: sbatch refused the job; the message is sbatch's own.
        """
        folder = make_folder(spec.folder)
        executor = _Executor(folder, spec, python=self.python)
        payload = Payload(spec.entry, spec.args)
        again = DelayedSubmission(payload)
        again.set_timeout(spec.resources.time_limit_min, executor.max_num_timeout)
        again.dump(folder / "payload.pkl")
        try:
            executor.update_parameters(**self._parameters(spec, folder))
            job = executor.submit(payload)
        except (FailedJobError, FailedSubmissionError) as error:
            raise LaunchError(
                f"sbatch refused job `{spec.name}`: {error}",
                where=str(folder / "job.sbatch"),
                hint="check partition, limits and extra options in the cluster file",
            ) from error
        self.watcher.submitted(job.job_id)
        num_tasks = spec.resources.num_tasks
        return JobHandle(self.backend, job.job_id, spec.name, spec.key, folder, num_tasks, time.time())

    def poll(self, handle: JobHandle) -> JobStatus:
        """State from the job's results if they are complete, else from Slurm (see `SlurmWatcher`)."""
        if has_all_results(handle):
            return status_from_results(handle)
        status = self.watcher.status(handle.job_id)
        return _explain(handle, status) if status.state in (JobState.FAILED, JobState.LOST) else status

    def cancel(self, handle: JobHandle) -> None:
        """Call scancel, which ends all steps of the job.

        Raises:
            LaunchError: scancel failed, and not because the job has ended.
        """
        _scancel(handle)

    def interrupt(self, handle: JobHandle) -> None:
        """Call scancel for SIGUSR2, which reaches the tasks and not the batch script; a job in the queue is cancelled.

        Raises:
            LaunchError: scancel failed, and not because the job has ended.
        """
        _scancel(handle, "--state=PENDING")
        _scancel(handle, "--signal=USR2")

    def collect(self, handle: JobHandle) -> list[Any]:
        """Return value of every task, by rank.

        Raises:
            Interrupted: the job was told to stop.
            LaunchError: the job failed, was cancelled or is still running.
        """
        status = self.poll(handle)
        if status.state is JobState.DONE:
            _wait_for_results(handle, self.results_timeout_s)
        dead = _first_dead_task(handle)
        return collect_values(handle, status, dead_rank=dead.rank if dead and dead.was_killed else None)

    def _parameters(self, spec: JobSpec, folder: Path) -> dict[str, Any]:
        resources = spec.resources
        variables = {**thread_environment(resources.cpus_per_task), **spec.env}
        parameters: dict[str, Any] = {
            "job_name": spec.name,
            "nodes": resources.num_nodes,
            "ntasks_per_node": resources.tasks_per_node,
            "cpus_per_task": resources.cpus_per_task,
            "time": resources.time_limit_min,
            "comment": f"dflop:{self.run_id}",
            "signal_delay_s": resources.signal_delay_s(self.signal_delay_s),
            "wckey": None,  # submitit's default is refused where sites enforce wckeys
            "setup": [
                "# The payload, under the name submitit expects, for whoever submits this file by hand.",
                f'(cd {shlex.quote(str(folder))} && cp -n payload.pkl "${{SLURM_JOB_ID}}_submitted.pkl")',
                *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
                # submitit would take SIGUSR2 for itself and requeue the job; this one it may have, nobody sends it.
                "export SUBMITIT_PREEMPT_SIGNAL=URG",
                *resources.setup,
            ],
            # Since 22.05 srun does not take --cpus-per-task from the batch job.
            "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={resources.cpus_per_task}", *self.srun_args],
            "additional_parameters": {name: value or True for name, value in resources.extra.items()},
        }
        if resources.num_idle_slots:
            parameters["additional_parameters"]["ntasks"] = resources.num_tasks  # makes ntasks_per_node a maximum
        if resources.memory_bytes:
            parameters["additional_parameters"].setdefault("mem", f"{resources.memory_bytes // 2**20}M")
        if resources.partition:
            parameters["partition"] = resources.partition
        if resources.gpus_per_node:
            parameters["gpus_per_node"] = resources.gpus_per_node
        return parameters


class _Executor(SlurmExecutor):
    """submitit's Slurm executor, with a readable script and without the surrounding job's environment."""

    def __init__(self, folder: Path, spec: JobSpec, *, python: str | None) -> None:
        super().__init__(folder, python=f"{_DEAF} {python or shlex.quote(sys.executable)}")
        self.spec = spec

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        shebang, rest = super()._make_submission_file_text(command, uid).split("\n", 1)
        spec = self.spec
        about = f"# dflop job `{spec.name}`: {spec.entry} {shlex.join(spec.args)}\n# key {spec.key}\n"
        text = f"{shebang}\n{about}# To run it again by hand: sbatch {Path(self.folder) / 'job.sbatch'}\n{rest}"
        (Path(self.folder) / "job.sbatch").write_text(text)
        return text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Inside a job, the outer job's SLURM_CPUS_PER_TASK, SBATCH_... and so on would bend the inner one.
        foreign = [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "SRUN_")) and n != "SLURM_CONF"]
        unset = [word for name in sorted(foreign) for word in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]


def _scancel(handle: JobHandle, *options: str) -> None:
    done = run_command(["scancel", *options, handle.job_id])
    if done.returncode != 0 and not any(ended in done.stderr for ended in _HAS_ENDED):
        command = " ".join(["scancel", *options, handle.job_id])
        raise LaunchError(f"scancel of {handle} failed: {done.stderr.strip()}", hint=command)


class _DeadTask(NamedTuple):
    rank: int
    reason: str
    was_killed: bool


def _first_dead_task(handle: JobHandle) -> _DeadTask | None:
    """First task srun complained about; srun writes to the stderr of the batch script."""
    log = log_paths(handle, 0).stderr
    match = _DEAD_TASK.search(log.read_text(errors="replace")) if log.exists() else None
    if match is None:
        return None
    rank = int(re.split(r"[,-]", match["tasks"])[0])
    how = {"Killed": "died (signal 9)", "Terminated": "died (signal 15)"}.get(match["how"], match["how"])
    return _DeadTask(rank, f"rank {rank} {how} on {match['node']}", not how.startswith("Exited"))


def _explain(handle: JobHandle, status: JobStatus) -> JobStatus:
    """Slurm says only NonZeroExitCode; the tasks' own words and srun's say more."""
    dead = _first_dead_task(handle)
    if dead is not None and dead.was_killed:
        return JobStatus(JobState.FAILED, dead.reason)
    if first_error(read_results(handle)) is not None:
        return status_from_results(handle)
    if dead is not None and _STOPPED in dead.reason:
        return JobStatus(JobState.INTERRUPTED, CHECKPOINTED)
    return JobStatus(status.state, dead.reason) if dead else status


def _wait_for_results(handle: JobHandle, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not has_all_results(handle) and time.monotonic() < deadline:
        handle.folder.chmod(0o700)  # makes NFS clients drop their cached listing
        time.sleep(0.2)
