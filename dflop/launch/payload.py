"""What a task runs and submitit pickles, how it learns its place among the others, and what it leaves when it stops.

The payload turns Slurm's words for a task's place into the variables that torch.distributed reads, leaves a pid file,
imports the entry and calls it. It imports nothing heavy, so that a broken entry fails with its own traceback. A job
that was told to stop and did leaves a line, so that its batch script knows that it may start again: srun's exit code
is 137 where one rank leaves some milliseconds after another.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflop.errors import LaunchError
from dflop.launch.job import JobSpec

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
        try:
            return load_entry(self.spec.entry)(*self.spec.args)
        except KeyboardInterrupt:  # how the others are ended when one has failed
            print("the task was ended from outside", file=sys.stderr, flush=True)
            raise SystemExit(128 + signal.SIGINT) from None


def task_environment(spec: JobSpec) -> dict[str, str]:
    """Set before a task's Python starts: BLAS libraries read their number of threads when they load.

    Modules do not come from the working directory: a dataset's folder may be that, and hold somebody's `json.py`.
    """
    return {"OMP_NUM_THREADS": str(spec.resources.cpus_per_task), "PYTHONSAFEPATH": "1", **spec.env}


def load_entry(entry: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    Raises:
        LaunchError: it is not of that form, or the module has no such function.
    """
    module_name, _, function_name = entry.partition(":")
    if not module_name or not function_name:
        raise LaunchError(f"entry `{entry}` is not of the form package.module:function")
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise LaunchError(f"module `{module_name}` has no function `{function_name}`", where=f"entry `{entry}`")
    return function  # type: ignore[no-any-return]  # getattr is Any; callable() was checked


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

    A MASTER_ADDR or MASTER_PORT is kept: scripts set them where the node's name leads to the wrong network.

    Raises:
        LaunchError: the task was not started by srun, a variable is no number or does not fit the others, or
            `scontrol` cannot expand the node list.
    """
    if "SLURM_PROCID" not in environ:
        hint = "start the tasks with srun or torchrun, see slurm/train.sbatch"
        raise LaunchError("neither RANK nor SLURM_PROCID is set", where="environment", hint=hint)
    world_size = _number(environ, "SLURM_NTASKS", 10_000_000)
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node_rank = _number(environ, "SLURM_NODEID", len(counts))
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT", 2**16, least=1)
    else:  # all tasks of a job agree on it without talking, and neighbours on shared nodes do not
        port = FIRST_PORT + _number(environ, "SLURM_JOB_ID", 2**63) % NUM_PORTS
    return {
        "RANK": str(_number(environ, "SLURM_PROCID", world_size)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(_number(environ, "SLURM_LOCALID", counts[node_rank])),
        "LOCAL_WORLD_SIZE": str(counts[node_rank]),
        "NODE_RANK": str(node_rank),
        # The step's nodes, not the job's: srun may leave nodes of its job out.
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": str(port),
    }


def _number(environ: Mapping[str, str], name: str, end: int, *, least: int = 0) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not least <= int(text) < end:
        what = f"{name} is `{text[:60]}`, expected a number from {least} and below {end}"
        hint = "start the tasks with srun, and leave its variables as they are"
        raise LaunchError(what, where="environment", hint=hint)
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node of a step; Slurm writes `2(x3),1` for 2, 2, 2, 1.

    Raises:
        LaunchError: the text is none of that kind.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part, re.ASCII)
        if match is None:
            raise LaunchError(f"cannot read Slurm's task counts `{text}`", where="SLURM_STEP_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(node_list: str) -> str:
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, ValueError, subprocess.CalledProcessError, IndexError) as error:
        what = f"`{' '.join(command)}` gives no host: {error}"
        raise LaunchError(what, hint="export MASTER_ADDR in the batch script") from error
