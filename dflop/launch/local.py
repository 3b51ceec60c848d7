"""Jobs as processes of this machine, through submitit's local executor.

submitit names jobs by pid, blanks CUDA_VISIBLE_DEVICES and lets the peers of a dead task wait; here each job has a
controller (`controller.py`) that ends them, ids are unique over time and devices stay visible. All state is in the
job's folder: submitit's pickle, `_process.json` (the controller), `_exit.json` (how the tasks ended), `_cancelled`.
Nodes are simulated: all tasks share one machine, hence one node. Jobs start at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import psutil
from submitit.local.local import LocalExecutor, LocalJob

from dflop import files
from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, Launcher, make_folder
from dflop.launch.payload import Payload, task_environment
from dflop.launch.process import JOB_VARIABLE, environment_of, kill_all, processes_of_job, tell, wait_for_end
from dflop.launch.results import DeadTask, collect_values, handle_of, has_all_results, status_from_results

_PROCESS, _EXIT, _CANCELLED = "process.json", "exit.json", "cancelled"


class LocalLauncher(Launcher):
    """Launcher for this machine; a job that is cancelled may clean up for a moment."""

    backend = "local"

    def __init__(self, *, cancel_grace_s: float = 3.0) -> None:
        self.cancel_grace_s = cancel_grace_s

    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobHandle]:
        for spec in specs:  # all that may be refused, before any job starts
            make_folder(spec.folder)
        jobs = [_Executor(spec).submit(Payload(self.backend, spec)) for spec in specs]
        return [handle_of(job.paths.submitted_pickle) for job in jobs]

    def poll_all(self, handles: Sequence[JobHandle]) -> list[JobStatus]:
        return [_status_of(handle) for handle in handles]

    def cancel(self, *handles: JobHandle) -> None:
        for handle in handles:
            if not self.poll(handle).state.is_final:
                handle.path(_CANCELLED).touch()
                processes = processes_of_job(handle.job_id)
                tell(_controller_of(handle), signal.SIGTERM)
                wait_for_end(processes, self.cancel_grace_s)
                kill_all(processes | processes_of_job(handle.job_id))

    def interrupt(self, handle: JobHandle) -> None:
        tell(_controller_of(handle), signal.SIGUSR2)

    def collect(self, handle: JobHandle) -> list[Any]:
        return collect_values(handle, self.poll(handle), _dead_task(handle))


class _Executor(LocalExecutor):
    """submitit's local executor, with our controller in its own session (setsid) and an unchanged environment."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec.folder)
        self.spec = spec

    def _submit_command(self, command: str) -> LocalJob[Any]:
        spec, job_id = self.spec, uuid.uuid4().hex[:12]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        env |= task_environment(spec) | {"SUBMITIT_EXECUTOR": "local", JOB_VARIABLE: job_id}
        args = [sys.executable, "-u", "-m", "dflop.launch.controller", str(self.folder), job_id]
        if setup := spec.resources.setup:
            args = ["bash", "-c", " && ".join([*setup, f"exec {shlex.join(args)}"])]
        # SIGUSR2 to what is started here waits until it is asked for: by the controller's loop, by tasks that listen.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            with (self.folder / f"{job_id}_controller.log").open("wb") as log:
                process = subprocess.Popen(
                    args, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        files.replace(self.folder / f"{job_id}_{_PROCESS}", json.dumps({"pid": process.pid}))
        return LocalJob(self.folder, job_id, tasks=range(spec.resources.num_tasks))


def _status_of(handle: JobHandle) -> JobStatus:
    if handle.read(_CANCELLED) is not None:
        return JobStatus(JobState.CANCELLED)
    controller = _controller_of(handle)
    # Asked after the controller: one that ends between the two questions has written its record by then.
    if (record := handle.read(_EXIT)) is not None:
        if json.loads(record)["timed_out"]:
            return JobStatus(JobState.TIMEOUT, "time limit reached")
        return status_from_results(handle, _dead_task(handle))
    if controller:
        return JobStatus(JobState.RUNNING)
    if handle.read(_PROCESS) is None:
        return JobStatus(JobState.LOST, "it was never started")
    kill_all(processes_of_job(handle.job_id))  # tasks of a killed controller live on
    if has_all_results(handle):
        return status_from_results(handle)
    return JobStatus(JobState.FAILED, "killed: its controller died before its tasks ended")


def _controller_of(handle: JobHandle) -> list[psutil.Process]:
    """While it lives: a later process with its pid has not the job's id in its environment, nor has a zombie."""
    with contextlib.suppress(psutil.Error):
        if record := handle.read(_PROCESS):
            process = psutil.Process(json.loads(record)["pid"])
            return [process] if environment_of(process).get(JOB_VARIABLE) == handle.job_id else []
    return []


def _dead_task(handle: JobHandle) -> DeadTask | None:
    dead = json.loads(handle.read(_EXIT) or "{}").get("dead")
    if dead is None:
        return None
    rank, code = dead
    return DeadTask(rank, f"died (signal {-code})" if code < 0 else f"exited with code {code} and no traceback")
