"""What a task runs and submitit pickles, how it learns its place among the others, and what it leaves when it stops.

The payload turns Slurm's words for a task's place into the variables that torch.distributed reads, leaves a pid file,
imports the entry and calls it. It imports nothing heavy, so that a broken entry fails with its own traceback. A job
that was told to stop and did leaves a line, so that its batch script knows that it may start again.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflop.errors import LaunchError
from dflop.launch.job import JobSpec
from dflop.progress import quiet_imports

STOPS_VARIABLE = "DFLOP_STOPS"
"""Names the file that lines are appended to; set by batch scripts, and by nobody else."""
NUM_CHANCES = 3
"""Starts in a row that may be stopped before they get anywhere."""
START_LINE = "dflop: start "
"""Begins a line that parts one start of a job from the next, in all its logs."""
FIRST_PORT, NUM_PORTS = 12000, 20000
"""Below 32768, where Linux hands out ephemeral ports."""


@dataclass(frozen=True)
class Payload:
    """Callable by reference: `entry(*args)` of a spec after the rank's environment is set."""

    backend: str
    spec: JobSpec
    submitted_at_s: float = field(default_factory=time.time)

    def __call__(self) -> Any:
        """Run this task; its return value becomes the task's result."""
        from submitit import JobEnvironment  # here: the submitting process needs the class, not submitit

        env = JobEnvironment()
        for number in (signal.SIGTERM, signal.SIGCONT):  # submitit ignores them, and its job would outlive a scancel
            signal.signal(number, signal.SIG_DFL)
        if self.backend == "slurm":
            os.environ |= srun_environment(os.environ)
        pid_file = env.paths.folder / f"{env.job_id}_{env.global_rank}.pid"  # for people with a debugger
        pid_file.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        if (restarts := os.environ.get("SLURM_RESTART_COUNT", "0")) != "0":
            print(f"{START_LINE}{int(restarts) + 1}", file=sys.stderr, flush=True)
        quiet_imports()
        try:
            return load_entry(self.spec.entry)(*self.spec.args)
        except KeyboardInterrupt:  # how the others are ended when one has failed
            print("the task was stopped from outside", file=sys.stderr, flush=True)
            raise SystemExit(128 + signal.SIGINT) from None


def task_environment(spec: JobSpec) -> dict[str, str]:
    """Set before a task's Python starts: BLAS libraries read their number of threads when they load.

    Modules do not come from the working directory: a dataset's folder may be that, and hold somebody's `json.py`.
    """
    return {"OMP_NUM_THREADS": str(spec.resources.cpus_per_task), "PYTHONSAFEPATH": "1", **spec.env}


def load_entry(entry: str) -> Callable[..., Any]:
    """The function that `package.module:function` names."""
    module_name, _, function_name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    return function


def note_stop(began_at: int, reached: int) -> None:
    """Leave the line: `began_at reached`, in units of the job's progress, on one rank, before any ends.

    What was reached is on disk.
    """
    if path := os.environ.get(STOPS_VARIABLE):
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{began_at} {reached}\n")
            file.flush()
            os.fsync(file.fileno())


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What `init_process_group("env://")` reads, for a task that `srun` started, from Slurm's variables.

    MASTER_ADDR is the batch script's: it may know that a node's name leads to the wrong network. So may be MASTER_PORT.

    Raises:
        LaunchError: the task was not started by srun, or the script names no MASTER_ADDR.
    """
    try:
        counts, node_rank = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]), int(environ["SLURM_NODEID"])
        # All tasks of a job agree on the port without talking, and neighbours on shared nodes do not.
        port = environ.get("MASTER_PORT") or FIRST_PORT + int(environ["SLURM_JOB_ID"]) % NUM_PORTS
        return {
            "RANK": environ["SLURM_PROCID"],
            "WORLD_SIZE": environ["SLURM_NTASKS"],
            "LOCAL_RANK": environ["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(counts[node_rank]),
            "NODE_RANK": str(node_rank),
            "MASTER_ADDR": environ["MASTER_ADDR"],
            "MASTER_PORT": str(port),
        }
    except (KeyError, ValueError, IndexError) as error:
        hint = "start the tasks with srun, as job.sbatch does, or torchrun"
        raise LaunchError(f"neither RANK nor all of srun's variables are set: {error}", hint=hint) from None


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node of a step; Slurm writes `2(x3),1` for 2, 2, 2, 1."""
    parts = [part.removesuffix(")").partition("(x") for part in text.split(",")]
    return [int(number) for number, _, times in parts for _ in range(int(times or 1))]
