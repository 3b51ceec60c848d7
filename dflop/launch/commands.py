"""Calls of Slurm's clients, with an environment in which they do what their arguments say and nothing else.

Inside a job, the job's own SLURM_CPUS_PER_TASK, SBATCH_... and so on would bend a job that is submitted from there; on
a login node a person's SQUEUE_STATES would hide jobs. No job gets the driver's PREFECT_...: a server's password is
among it, and no job talks to a server.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence

from dflop.errors import InfrastructureError

COMMENT = "dflop:"
"""Begins the comment of every job that is submitted to Slurm; the id of its run follows."""
COMMAND_TIMEOUT_S = 60

_CLIENT_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"})
"""Where the cluster is, and the token it knows a person by."""
_WHO_AND_WHERE = ("account", "constraint", "partition", "qos", "reservation", "wckey")
"""Options that people set for all their jobs, as SBATCH_ACCOUNT and the like."""
_BENDS_CLIENTS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_NOBODY_ANSWERS = re.compile(
    r"contact slurm controller|connect(ion)? (failure|refused|timed out)|socket timed out|standby mode|zero bytes were|"
    r"temporarily unable|unable to resolve|no answer within",
    re.IGNORECASE,
)

Command = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


class ControllerAway(InfrastructureError):
    """Slurm's controller does not answer, which refuses nothing."""


def is_away(said: str) -> bool:
    """Whether a client failed because its controller does not answer."""
    return _NOBODY_ANSWERS.search(said) is not None


def run_command(
    args: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a Slurm client; a missing or hanging one is an ordinary failure.

    Args:
        args: The command.
        environment: Of the process; default: what is good for clients that show something.
        timeout_s: How long it may take.
    """
    env = client_environment(os.environ) if environment is None else environment
    try:
        return subprocess.run(
            args, env=env, capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(args, 127, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(args, 127, "", f"{args[0]}: {error.strerror}")


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For squeue, sacct, scontrol, scancel: times are seconds since the epoch, lists of array elements are whole."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_BENDS_CLIENTS)}
    return kept | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def job_environment(environ: Mapping[str, str], said: Collection[str] = ()) -> dict[str, str]:
    """For a job: what this process has, but for the variables of a surrounding job and of its Prefect.

    Args:
        environ: Of this process.
        said: Options that a batch script sets; variables, which would win over them, stay for others only.
    """
    wanted = {f"SBATCH_{name.upper()}" for name in _WHO_AND_WHERE if name not in said} | _CLIENT_VARIABLES
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "PREFECT_")
    return {name: value for name, value in environ.items() if not name.startswith(foreign) or name in wanted}


def last_line(text: str) -> str:
    """What a client said last, which is why it failed."""
    return text.strip().splitlines()[-1] if text.strip() else ""
