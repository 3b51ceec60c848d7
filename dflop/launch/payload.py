"""What submitit pickles: three names and a port. Runs in every task of a job.

The payload turns submitit's view of the job into the variables torch.distributed reads, leaves a pid file, imports
the entry and calls it. It imports nothing heavy, so that a broken entry fails with its own traceback.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import LaunchError
from dflop.launch.ranks import port_of_job, rank_environment, tasks_per_node


@dataclass(frozen=True)
class Payload:
    """Callable by reference: `entry(*args)` after the rank's environment is set."""

    entry: str
    args: tuple[str, ...]
    master_port: int = 0
    """0: derive it from the job id."""

    def __call__(self) -> Any:
        """Run this task; its return value becomes the task's result."""
        from submitit import JobEnvironment  # here: the submitting process needs the class, not submitit

        env = JobEnvironment()
        is_local = env.cluster == "local"
        on_nodes = [env.num_tasks] if is_local else tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        os.environ |= rank_environment(
            rank=env.global_rank,
            world_size=env.num_tasks,
            local_rank=env.local_rank,
            local_world_size=on_nodes[env.node],
            node_rank=env.node,
            master_addr="127.0.0.1" if is_local else env.hostnames[0],
            master_port=self.master_port or port_of_job(env.raw_job_id),
        )
        write_pid_file(env.paths.folder, env.job_id, env.global_rank)
        return load_entry(self.entry)(*self.args)


def thread_environment(cpus_per_task: int) -> dict[str, str]:
    """Must be set before the task's first import: BLAS libraries read it when they load."""
    return {"OMP_NUM_THREADS": str(cpus_per_task)}


def write_pid_file(folder: Path, job_id: str, rank: int) -> None:
    """Leave `<job_id>_<rank>.pid` with `pid hostname`, for people with a debugger."""
    (folder / f"{job_id}_{rank}.pid").write_text(f"{os.getpid()} {socket.gethostname()}\n")


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
