"""What differs from one Slurm to another: how GPUs are asked for, what may be asked for, and what tasks run in.

The words are those of `SlurmConfig`; this room knows no configuration, so `run/launcher.py` translates.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

_UNTIL_IT_LISTENS = (
    "sh", "-c",
    'trap "" USR2; env --block-signal=USR2 true 2>/dev/null && exec env --block-signal=USR2 "$@"; exec "$@"', "sh",
)  # fmt: skip
"""Starts a command for which SIGUSR2 waits until it asks for it; by default it would be killed. Where `env` is too old
(coreutils before 8.31) an early signal is lost."""


@dataclass(frozen=True, slots=True)
class Container:
    """An image that tasks run in."""

    image: str
    runtime: str = "apptainer"
    """`apptainer`: a command before Python; `pyxis`: options of srun."""
    mounts: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    python: str = "python3"


@dataclass(frozen=True, slots=True)
class Site:
    """A Slurm's dialect, the same for all jobs."""

    gpus: str = "gpus-per-node"
    """Option that asks for them, `gres`, or `none`."""
    gpu_type: str = ""
    ask_for_memory: bool = True
    requeue: bool = True
    signal_delay_s: int = 90
    """How long before the time limit tasks get SIGUSR2."""
    max_jobs_at_once: int = 0
    """Of a job array; 0: no limit."""
    srun_args: tuple[str, ...] = ()
    container: Container | None = None
    python: str = sys.executable
    """Where there is no container."""

    def gpu_options(self, num_gpus: int) -> dict[str, str]:
        """Options that ask for so many GPUs per node; none at zero: clusters without refuse even that."""
        if not num_gpus or self.gpus == "none":
            return {}
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        return {"gres": f"gpu:{kind}{num_gpus}"} if self.gpus == "gres" else {"gpus-per-node": f"{kind}{num_gpus}"}

    def srun_options(self) -> list[str]:
        """Options of srun that only this site needs."""
        box = self.container
        if box is None or box.runtime != "pyxis":
            return [*self.srun_args]
        # Pyxis wants source and target; a folder that is mounted where it is has one name.
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in box.mounts)
        into = [f"--container-image={box.image}", *([f"--container-mounts={mounts}"] if mounts else [])]
        return [*self.srun_args, *into, *box.args]

    def task_command(self, *, has_gpus: bool) -> str:
        """What starts Python, quoted for a shell."""
        box, words = self.container, [*_UNTIL_IT_LISTENS]
        if box is not None and box.runtime == "apptainer":
            mounts = [word for mount in box.mounts for word in ("--bind", mount)]
            words += ["apptainer", "exec", *(["--nv"] if has_gpus else []), *mounts, *box.args, box.image]
        return shlex.join([*words, self.python if box is None else box.python, "-P"])
