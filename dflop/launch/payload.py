"""What a task runs and submitit pickles: the names of a function and its arguments; and what all tasks share.

The payload turns submitit's view of the job into the variables torch.distributed reads, leaves a pid file, imports
the entry and calls it. It imports nothing heavy, so that a broken entry fails with its own traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflop.errors import LaunchError
from dflop.launch.job import JobSpec
from dflop.launch.marks import START_LINE
from dflop.launch.ranks import rank_environment, srun_environment


@dataclass(frozen=True)
class Payload:
    """Callable by reference: `entry(*args)` of a spec after the rank's environment is set."""

    backend: str
    spec: JobSpec
    master_port: int = 0
    """Of a job of this machine; on Slurm the job's id gives it."""

    def __call__(self) -> Any:
        """Run this task; its return value becomes the task's result."""
        from submitit import JobEnvironment  # here: the submitting process needs the class, not submitit

        env = JobEnvironment()
        for number in (signal.SIGTERM, signal.SIGCONT):  # submitit ignores them, and its job would outlive a scancel
            signal.signal(number, signal.SIG_DFL)
        os.environ |= srun_environment(os.environ) if self.backend == "slurm" else self._on_this_machine(env)
        pid_file = env.paths.folder / f"{env.job_id}_{env.global_rank}.pid"  # for people with a debugger
        pid_file.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        if (restarts := os.environ.get("SLURM_RESTART_COUNT", "0")) != "0":
            print(f"{START_LINE}{int(restarts) + 1}", file=sys.stderr, flush=True)
        try:
            return load_entry(self.spec.entry)(*self.spec.args)
        except KeyboardInterrupt:  # how submitit ends the others when one has failed
            print("the task was ended from outside", file=sys.stderr, flush=True)
            raise SystemExit(128 + signal.SIGINT) from None

    def _on_this_machine(self, env: Any) -> dict[str, str]:
        return rank_environment(
            rank=env.global_rank, world_size=env.num_tasks, local_rank=env.local_rank, local_world_size=env.num_tasks,
            node_rank=0, master_addr="127.0.0.1", master_port=self.master_port,
        )  # fmt: skip


def task_environment(spec: JobSpec) -> dict[str, str]:
    """Must be set before a task's Python starts, and its children's.

    BLAS libraries read their number of threads when they load. Modules do not come from the working directory: a
    dataset's folder may be that, and hold a `json.py` that somebody else wrote.
    """
    return {"OMP_NUM_THREADS": str(spec.resources.cpus_per_task), "PYTHONSAFEPATH": "1", **spec.env}


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
