"""The process that owns a local job: forks its tasks, watches them, and ends them together.

`python -m dflop.launch.controller FOLDER JOB_ID`, started by `local.py` in its own session (setsid), so that the job
outlives the process that submitted it. It leaves a record of how its tasks ended and no orphans. When one task fails
the others are ended: they would hang in a collective for ever.

Several tasks share one import of their entry: where cores are few, importing torch and a model's code per rank is most
of a short job. Not those with GPUs: a library may touch the device when it is imported, and CUDA survives no fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from submitit.core.utils import JobPaths

from dflop import files
from dflop.launch.job import JobSpec
from dflop.launch.payload import FIRST_PORT, NUM_PORTS
from dflop.launch.process import kill_all, processes_of_job, tell, wait_until
from dflop.launch.results import payload_of

TIMEOUT_SIGNAL_DELAY_S = 60  # before the time limit tasks get SIGUSR2
LOOKS_EVERY_S = 0.04
PEER_GRACE_S, INTERRUPT_GRACE_S = 2.0, 1.0
"""How long tasks may go on after one failed, to write the traceback that explains the failure; and after SIGINT."""
PICKLE_WITHIN_S = 60  # or its submitter died before it named the pickle, and there is no job


def watch(tasks: Sequence[psutil.Process], limit_s: float, warning_s: float) -> dict[str, Any]:
    """How tasks ended: when all have, when one has failed and its peers had their time, or when the limit has passed.

    SIGUSR2, which is blocked here (see `local.py`), is passed on to them, and sent so long before the limit.
    """
    limit = time.monotonic() + limit_s
    warn_at = limit - warning_s
    dead: tuple[int, int] | None = None
    while True:
        codes, now = [_exit_code(task) for task in tasks], time.monotonic()
        if dead is None and (failed := [(rank, code) for rank, code in enumerate(codes) if code]):
            # Signals first: of several tasks seen dead at once, that one did not die of the others.
            dead = min(failed, key=lambda task: task[1] > 0)
            limit = min(limit, now + PEER_GRACE_S)
        if None not in codes or now >= limit:
            return {"dead": dead, "timed_out": dead is None and None in codes}
        must_tell = signal.sigtimedwait({signal.SIGUSR2}, LOOKS_EVERY_S) is not None
        if now >= warn_at:
            warn_at, must_tell = float("inf"), True
        if must_tell and dead is None:
            tell(tasks, signal.SIGUSR2)


def _exit_code(task: psutil.Process) -> int | None:
    """Minus the signal that ended it, else its exit code; None while it runs."""
    with contextlib.suppress(psutil.TimeoutExpired):
        return int(task.wait(0))
    return None


def _preload(spec: JobSpec) -> None:
    """Import an entry's module for all tasks at once, and what its `preload(*args)` imports, where it has one.

    Nothing there may start a thread, open a connection or touch a device.
    """
    with contextlib.suppress(Exception, SystemExit):  # the tasks meet the same and report it
        module = importlib.import_module(spec.entry.partition(":")[0])
        if hasattr(module, "preload"):
            module.preload(*spec.args)
    gc.freeze()  # the tasks' collectors would write to, hence copy, every object imported here


def _free_port() -> int:
    """Free, and below those that Linux hands out to connections: else one of them may take it before rank 0 listens."""
    while True:
        port = random.randrange(FIRST_PORT, FIRST_PORT + NUM_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _become_task(paths: JobPaths, rank: int, num_tasks: int, port: int) -> None:
    """What an exec would have done for this fork of the controller, and the variables of a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for path, stream in ((paths.stdout, 1), (paths.stderr, 2)):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, stream)
        os.close(log)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_GLOBALID"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SUBMITIT_LOCAL_NTASKS"), str(num_tasks))
    os.environ |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.suppress(OSError):  # for people who look at `top`
        Path("/proc/self/comm").write_text(f"rank{rank}")


def main(folder: str, job_id: str) -> None:
    """Run the job to its end, take everything it started down with it, and only then say how it ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    tasks, record, is_task = list[psutil.Process](), None, False
    try:
        pickle = JobPaths(folder, job_id).submitted_pickle
        wait_until(pickle.exists, PICKLE_WITHIN_S)
        spec = payload_of(pickle).spec
        r = spec.resources
        if r.num_tasks > 1 and not r.gpus_per_node:
            _preload(spec)
        port = _free_port()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while not is_task and len(tasks) < r.num_tasks:
            if is_task := (pid := os.fork()) == 0:
                _become_task(JobPaths(folder, job_id, len(tasks)), len(tasks), r.num_tasks, port)
            else:
                tasks.append(psutil.Process(pid))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not is_task:
            record = watch(tasks, 60 * r.time_limit_min, r.signal_delay_s(TIMEOUT_SIGNAL_DELAY_S))
    except KeyboardInterrupt:
        print(f"job {job_id} was stopped", file=sys.stderr)
    finally:
        if not is_task:
            with contextlib.suppress(KeyboardInterrupt):
                tell(tasks, signal.SIGINT)
                wait_until(lambda: None not in map(_exit_code, tasks), INTERRUPT_GRACE_S)
            kill_all(processes_of_job(job_id) - {psutil.Process()})
    if is_task:
        from submitit.core.submission import process_job

        process_job(folder)  # and from there to the end of the program, as a task of its own Python does
    elif record is not None:
        files.replace(Path(folder) / f"{job_id}_exit.json", json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
