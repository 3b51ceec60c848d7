"""What a task of a local job runs, submitit pickles it: three names and a port; and what tasks of all backends share.

The payload turns submitit's view of the job into the variables torch.distributed reads, leaves a pid file, imports
the entry and calls it. It imports nothing heavy, so that a broken entry fails with its own traceback. Tasks on Slurm
run `task.py`, without submitit and without a pickle.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import LaunchError
from dflop.launch.ranks import rank_environment


@dataclass(frozen=True)
class Payload:
    """Callable by reference: `entry(*args)` after the rank's environment is set."""

    entry: str
    args: tuple[str, ...]
    master_port: int

    def __call__(self) -> Any:
        """Run this task; its return value becomes the task's result."""
        from submitit import JobEnvironment  # here: the submitting process needs the class, not submitit

        env = JobEnvironment()
        os.environ |= rank_environment(
            rank=env.global_rank,
            world_size=env.num_tasks,
            local_rank=env.local_rank,
            local_world_size=env.num_tasks,
            node_rank=0,
            master_addr="127.0.0.1",
            master_port=self.master_port,
        )
        write_pid_file(env.paths.folder, env.job_id, env.global_rank)
        try:
            return load_entry(self.entry)(*self.args)
        except KeyboardInterrupt:  # how submitit ends the others when one has failed
            print("the task was ended from outside", file=sys.stderr, flush=True)
            raise SystemExit(128 + signal.SIGINT) from None


def thread_environment(cpus_per_task: int) -> dict[str, str]:
    """Must be set before the task's first import: BLAS libraries read it when they load."""
    return {"OMP_NUM_THREADS": str(cpus_per_task)}


def import_environment() -> dict[str, str]:
    """Must be set before a task's Python starts, and its children's: modules do not come from the working directory.

    A dataset's folder may be that, and hold a `json.py` that somebody else wrote.
    """
    return {"PYTHONSAFEPATH": "1"}


def write_pid_file(folder: Path, job_id: str, rank: int) -> None:
    """Leave `<job_id>_<rank>.pid` with `pid hostname`, for people with a debugger."""
    (folder / f"{job_id}_{rank}.pid").write_text(f"{os.getpid()} {socket.gethostname()}\n")


def preload(entry: str, args: Sequence[str]) -> None:
    """Import an entry's module for all tasks at once, and what its `preload(*args)` imports, where it has one.

    Tasks are forked after this: nothing here may start a thread, open a connection or touch a device.
    """
    module = importlib.import_module(entry.partition(":")[0])
    if hasattr(module, "preload"):
        module.preload(*args)


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
