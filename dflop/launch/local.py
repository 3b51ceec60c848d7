"""Jobs as processes of this machine, through submitit's local executor.

submitit starts everything at once, names jobs by pid and blanks CUDA_VISIBLE_DEVICES; here at most `max_jobs` run at
a time (a timing probe wants the machine to itself), ids are unique over time and devices stay visible. All state is
in the job's folder: `_handle.json` (which job it is), `_owner.json` (the process in charge: a controller, or this
process while the job queues), `_exit.json` (how the tasks ended), `_cancelled`. Nodes are simulated: all tasks share
one machine, hence one node.
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
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from dflop.errors import Interrupted
from dflop.launch.job import CHECKPOINTED, JobHandle, JobSpec, JobState, JobStatus, OneByOne, make_folder, write_json
from dflop.launch.payload import Payload, import_environment, thread_environment
from dflop.launch.process import ProcessId, end_family
from dflop.launch.ranks import FIRST_PORT, NUM_PORTS
from dflop.launch.results import collect_values, has_all_results, result_path, status_from_results
from dflop.records import from_dict, to_dict

TIMEOUT_SIGNAL_DELAY_S = 60
_HANDLE = "handle.json"


class LocalLauncher(OneByOne):
    """Launcher for this machine, with a first-in first-out queue.

    Args:
        max_jobs: How many jobs of this launcher run at once; later ones start when `poll` or `submit` finds room.
        cancel_grace_s: How long a cancelled job may clean up before it is killed.
    """

    backend = "local"

    def __init__(self, *, max_jobs: int = 1, cancel_grace_s: float = 3.0) -> None:
        self.max_jobs = max_jobs
        self.cancel_grace_s = cancel_grace_s
        self._lock = threading.RLock()
        self._queue: dict[str, tuple[JobHandle, JobSpec]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, spec: JobSpec) -> JobHandle:
        """Start the job if there is room, else queue it in this process."""
        folder = make_folder(spec.folder)
        job_id = uuid.uuid4().hex[:12]
        handle = JobHandle(self.backend, job_id, spec.name, spec.key, folder, spec.resources.num_tasks, time.time())
        # First: of a process that dies from here on, the next one finds the job.
        write_json(handle.path(_HANDLE), json.loads(handle.to_json()))
        with self._lock:
            self._queue[job_id] = (handle, spec)
            _Owner.of(os.getpid(), is_controller=False).write(handle)
            self._admit()
        return handle

    def strays(self, specs: Sequence[JobSpec], known: Collection[str]) -> list[JobHandle]:
        """Jobs in the specs' folders that nobody has noted and that began."""
        keys, found = {spec.key for spec in specs}, []
        for folder in {spec.folder.absolute() for spec in specs}:
            for file in folder.glob(f"*_{_HANDLE}"):
                handle = JobHandle.from_json(file.read_text())
                is_ours = handle.key in keys and handle.job_id not in known
                if is_ours and _read_status(handle).state is not JobState.LOST:
                    found.append(handle)
        return sorted(found, key=lambda handle: handle.submitted_at_s)

    def poll(self, handle: JobHandle) -> JobStatus:
        """State from the job's folder and /proc; also starts queued jobs for which there is room."""
        with self._lock:
            self._admit()
            queue = list(self._queue)
        if handle.job_id in queue:
            return JobStatus(JobState.QUEUED, f"{queue.index(handle.job_id)} jobs ahead, {self.max_jobs} run at once")
        return _read_status(handle)

    def cancel(self, *handles: JobHandle) -> None:
        """End the jobs' tasks and all their children."""
        for handle in handles:
            self._cancel(handle)

    def _cancel(self, handle: JobHandle) -> None:
        with self._lock:
            if _read_status(handle).state.is_final:
                return
            handle.path("cancelled").touch()
            if self._queue.pop(handle.job_id, None) is not None:
                return
        owner = _Owner.read(handle)
        # A job queued in another process is left to that process, which sees the mark before it starts the job.
        if owner is not None and owner.is_controller:
            end_family(owner.process, grace_s=self.cancel_grace_s)

    def interrupt(self, handle: JobHandle) -> None:
        """Have the job's controller tell every task to stop; a job in a queue, of whichever process, is cancelled."""
        with self._lock:
            if _read_status(handle).state is JobState.QUEUED:
                self._cancel(handle)
                return
        owner = _Owner.read(handle)
        if owner is not None and owner.is_controller:
            owner.process.send(signal.SIGUSR2)

    def collect(self, handle: JobHandle) -> list[Any]:
        """Return value of every task, by rank.

        Raises:
            LaunchError: the job failed, was cancelled or is still running.
        """
        exit_record = _read_json(handle.path("exit.json"))
        dead_rank = exit_record["dead_rank"] if exit_record else None
        was_killed = exit_record is not None and dead_rank is not None and exit_record["codes"][dead_rank] < 0
        return collect_values(handle, self.poll(handle), ended_by=dead_rank, was_killed=was_killed)

    def _admit(self) -> None:
        self._running = {job_id: p for job_id, p in self._running.items() if p.poll() is None}
        for job_id, (handle, spec) in list(self._queue.items()):
            if len(self._running) >= self.max_jobs:
                return
            del self._queue[job_id]
            if handle.path("cancelled").exists():
                continue
            self._running[job_id] = _start(handle, spec)
            if handle.path("cancelled").exists():  # by another process, while the job started
                owner = _Owner.read(handle)
                assert owner is not None
                end_family(owner.process, grace_s=self.cancel_grace_s)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The process in charge of a job, as `_owner.json` names it."""

    process: ProcessId
    is_controller: bool
    """False: the process that submitted it, which holds it in its queue."""

    @staticmethod
    def of(pid: int, *, is_controller: bool) -> _Owner:
        process = ProcessId.of(pid)
        assert process is not None, "this process, or a child that was not yet waited for"
        return _Owner(process, is_controller)

    @staticmethod
    def read(handle: JobHandle) -> _Owner | None:
        record = _read_json(handle.path("owner.json"))
        return from_dict(_Owner, record) if record else None

    def write(self, handle: JobHandle) -> None:
        write_json(handle.path("owner.json"), to_dict(self))


class _OneJobExecutor(LocalExecutor):
    """submitit's local executor, with our controller in a session of its own and the environment left alone."""

    def __init__(self, handle: JobHandle, spec: JobSpec) -> None:
        super().__init__(handle.folder)
        self.handle = handle
        self.spec = spec
        self.controller: subprocess.Popen[bytes]

    def _submit_command(self, command: str) -> LocalJob[Any]:
        resources, job_id, folder = self.spec.resources, self.handle.job_id, str(self.handle.folder)
        env = {
            **os.environ,
            **thread_environment(resources.cpus_per_task),
            **import_environment(),
            **self.spec.env,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(resources.num_tasks),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * resources.time_limit_min),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(resources.signal_delay_s(TIMEOUT_SIGNAL_DELAY_S)),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
        }
        args = [sys.executable, "-u", "-m", "dflop.launch.controller", folder, job_id]
        if self.spec.imports_once:
            args += [self.spec.entry, *self.spec.args]
        if resources.setup:
            args = ["bash", "-c", " && ".join([*resources.setup, f"exec {shlex.join(args)}"])]
        with self.handle.path("controller.log").open("wb") as log, _interruptible_later():
            self.controller = subprocess.Popen(
                args, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        _Owner.of(self.controller.pid, is_controller=True).write(self.handle)
        return LocalJob(folder, job_id, tasks=list(range(resources.num_tasks)), process=self.controller)


def _start(handle: JobHandle, spec: JobSpec) -> subprocess.Popen[bytes]:
    executor = _OneJobExecutor(handle, spec)
    executor.update_parameters(timeout_min=spec.resources.time_limit_min)
    executor.submit(Payload(spec.entry, spec.args, master_port=_free_port()))
    return executor.controller


@contextlib.contextmanager
def _interruptible_later() -> Iterator[None]:
    """SIGUSR2 to what is started here waits until it is asked for: by the controller's loop, by tasks that listen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_status(handle: JobHandle) -> JobStatus:
    if handle.path("cancelled").exists():
        return JobStatus(JobState.CANCELLED)
    owner = _Owner.read(handle)
    alive = owner is not None and owner.process.is_alive
    # Asked after the owner: a controller that ends between the two questions has written its record by then.
    if (record := _read_json(handle.path("exit.json"))) is not None:
        return _status_from_exit(handle, record)
    if owner is None or not (alive or owner.is_controller):
        return JobStatus(JobState.LOST, "the process that held it in its queue has died")
    if not owner.is_controller:
        return JobStatus(JobState.QUEUED, f"held by process {owner.process.pid}")
    if alive:
        return JobStatus(JobState.RUNNING)
    end_family(owner.process, grace_s=0)  # tasks of a killed controller live on
    if has_all_results(handle):
        return status_from_results(handle)
    return JobStatus(JobState.FAILED, "killed: its controller died before its tasks had ended")


def _status_from_exit(handle: JobHandle, record: dict[str, Any]) -> JobStatus:
    if record["timed_out"]:
        return JobStatus(JobState.TIMEOUT, "time limit reached")
    rank = record["dead_rank"]
    if rank is not None:
        code = record["codes"][rank]
        if code < 0:
            return JobStatus(JobState.FAILED, f"rank {rank} died (signal {-code})")
        if result_path(handle, rank).exists():
            return status_from_results(handle)
        if code == Interrupted.exit_code:
            return JobStatus(JobState.INTERRUPTED, CHECKPOINTED)
        return JobStatus(JobState.FAILED, f"rank {rank} exited with code {code} and no traceback")
    return status_from_results(handle)


def _read_json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(path.read_text()))
    return None


def _free_port() -> int:
    """Free, and below those that Linux hands out to connections: else one of them may take it before rank 0 listens."""
    while True:
        port = random.randrange(FIRST_PORT, FIRST_PORT + NUM_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
