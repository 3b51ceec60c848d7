"""Jobs as processes of this machine, through submitit's local executor.

submitit starts everything at once, names jobs by pid and blanks CUDA_VISIBLE_DEVICES; here each job has a controller
(`controller.py`) that waits until one of `max_jobs` places is free (a timing probe wants the machine to itself), ids
are unique over time and devices stay visible. As on Slurm, what was submitted outlives the process that submitted it.
All state is in the job's folder: submitit's pickle, `_process.json` (the controller), `_exit.json` (how the tasks
ended), `_cancelled`. Nodes are simulated: all tasks share one machine, hence one node.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from dflop import files
from dflop.errors import Interrupted
from dflop.launch.job import CHECKPOINTED, JobHandle, JobSpec, JobState, JobStatus, OneByOne, log_paths, make_folder
from dflop.launch.payload import Payload, task_environment
from dflop.launch.process import ProcessId, end_family
from dflop.launch.ranks import FIRST_PORT, NUM_PORTS
from dflop.launch.results import collect_values, has_all_results, status_from_results
from dflop.launch.submitted import handle_of
from dflop.records import from_dict, to_dict

TIMEOUT_SIGNAL_DELAY_S = 60
_PROCESS, _EXIT, _CANCELLED = "process.json", "exit.json", "cancelled"


class LocalLauncher(OneByOne):
    """Launcher for this machine.

    Args:
        max_jobs: How many jobs of this launcher run at once; the others wait.
        cancel_grace_s: How long a cancelled job may clean up before it is killed.
    """

    backend = "local"

    def __init__(self, *, max_jobs: int = 1, cancel_grace_s: float = 3.0) -> None:
        self.max_jobs = max_jobs
        self.cancel_grace_s = cancel_grace_s
        self._places = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the launcher lives
        """Controllers lock a byte of it each, and the kernel unlocks it when they end."""

    def submit(self, spec: JobSpec) -> JobHandle:
        """Start the job's controller, which starts the tasks once there is a place for them."""
        make_folder(spec.folder)
        executor = _Executor(spec, self._places.fileno(), self.max_jobs)
        job = executor.submit(Payload(self.backend, spec, master_port=_free_port()))
        return handle_of(job.paths.submitted_pickle)

    def poll(self, handle: JobHandle) -> JobStatus:
        """State from the job's folder and /proc."""
        if handle.read(_CANCELLED) is not None:
            return JobStatus(JobState.CANCELLED)
        controller = _controller_of(handle)
        is_alive = controller is not None and controller.is_alive
        # Asked after the controller: one that ends between the two questions has written its record by then.
        if (record := handle.read(_EXIT)) is not None:
            return _status_from_exit(handle, json.loads(record))
        if is_alive:
            has_begun = os.path.exists(log_paths(handle).stdout)
            return JobStatus(JobState.RUNNING) if has_begun else JobStatus(JobState.QUEUED, "waits for its turn")
        if controller is None:
            return JobStatus(JobState.LOST, "it was never started")
        end_family(controller, grace_s=0)  # tasks of a killed controller live on
        if has_all_results(handle):
            return status_from_results(handle)
        return JobStatus(JobState.FAILED, "killed: its controller died before its tasks had ended")

    def cancel(self, *handles: JobHandle) -> None:
        """End the jobs' tasks and all their children."""
        for handle in handles:
            controller = _controller_of(handle)
            if controller is not None and not self.poll(handle).state.is_final:
                handle.path(_CANCELLED).touch()
                end_family(controller, grace_s=self.cancel_grace_s)

    def interrupt(self, handle: JobHandle) -> None:
        """Have the job's controller tell every task to stop; a job that waits is cancelled."""
        state, controller = self.poll(handle).state, _controller_of(handle)
        if state is JobState.QUEUED:
            self.cancel(handle)
        elif state is JobState.RUNNING and controller is not None:
            controller.send(signal.SIGUSR2)

    def collect(self, handle: JobHandle) -> list[Any]:
        """Return value of every task, by rank.

        Raises:
            LaunchError: the job failed, was cancelled or is still running.
        """
        record = json.loads(handle.read(_EXIT) or "{}")
        dead_rank = record.get("dead_rank")
        was_killed = dead_rank is not None and record["codes"][dead_rank] < 0
        return collect_values(handle, self.poll(handle), ended_by=dead_rank, was_killed=was_killed)


class _Executor(LocalExecutor):
    """submitit's local executor, with our controller in a session of its own and the environment left alone.

    Args:
        spec: The job.
        places: File descriptor on which controllers wait for each other.
        max_jobs: How many of them may run at once.
    """

    def __init__(self, spec: JobSpec, places: int, max_jobs: int) -> None:
        super().__init__(spec.folder)
        self.spec, self.places, self.max_jobs = spec, places, max_jobs

    def _submit_command(self, command: str) -> LocalJob[Any]:
        spec, r, job_id = self.spec, self.spec.resources, uuid.uuid4().hex[:12]
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            **task_environment(spec),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(r.num_tasks),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * r.time_limit_min),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(r.signal_delay_s(TIMEOUT_SIGNAL_DELAY_S)),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
        }
        args = [sys.executable, "-u", "-m", "dflop.launch.controller", str(self.folder), job_id]
        args += [str(self.places), str(self.max_jobs), *([spec.entry, *spec.args] if spec.imports_once else [])]
        if r.setup:
            args = ["bash", "-c", " && ".join([*r.setup, f"exec {shlex.join(args)}"])]
        job: LocalJob[Any] = LocalJob(self.folder, job_id, tasks=range(r.num_tasks))
        with (self.folder / f"{job_id}_controller.log").open("wb") as log, _interruptible_later():
            process = subprocess.Popen(
                args, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(self.places,),
            )  # fmt: skip
        found = ProcessId.of(process.pid)
        assert found is not None, "a child that was not yet waited for"
        files.replace(self.folder / f"{job_id}_{_PROCESS}", json.dumps(to_dict(found)))
        return job


@contextlib.contextmanager
def _interruptible_later() -> Iterator[None]:
    """SIGUSR2 to what is started here waits until it is asked for: by the controller's loop, by tasks that listen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _controller_of(handle: JobHandle) -> ProcessId | None:
    record = handle.read(_PROCESS)
    return from_dict(ProcessId, json.loads(record)) if record else None


def _status_from_exit(handle: JobHandle, record: dict[str, Any]) -> JobStatus:
    if record["timed_out"]:
        return JobStatus(JobState.TIMEOUT, "time limit reached")
    rank = record["dead_rank"]
    if rank is not None:
        code = record["codes"][rank]
        if code < 0:
            return JobStatus(JobState.FAILED, f"rank {rank} died (signal {-code})")
        if handle.read(f"{rank}_result.pkl") is not None:
            return status_from_results(handle)
        if code == Interrupted.exit_code:
            return JobStatus(JobState.INTERRUPTED, CHECKPOINTED)
        return JobStatus(JobState.FAILED, f"rank {rank} exited with code {code} and no traceback")
    return status_from_results(handle)


def _free_port() -> int:
    """Free, and below those that Linux hands out to connections: else one of them may take it before rank 0 listens."""
    while True:
        port = random.randrange(FIRST_PORT, FIRST_PORT + NUM_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
