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

from dflop.errors import InfrastructureError, LaunchError

COMMENT = "dflop:"
"""Begins the comment of every job that is submitted to Slurm; the id of its run follows."""
COMMAND_TIMEOUT_S = 60
_HAS_ENDED = ("Invalid job id", "already completing or completed")
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
_TAB, _QUEUE_FIELDS = "\x1f", ("%i", "%T", "%o", "%k", "%j")
"""A separator that is in no path, comment or name."""

Command = Callable[..., subprocess.CompletedProcess[str]]
"""`run_command`, or what stands in for it."""


class NotNow(InfrastructureError):
    """Slurm takes no job just now: its controller does not answer, or the account has as many jobs as it may."""


def is_away(said: str) -> bool:
    """Whether a client failed because its controller does not answer."""
    return _NOBODY_ANSWERS.search(said) is not None


def run_command(
    args: Sequence[str], environment: Mapping[str, str] | None = None, *, timeout_s: float = COMMAND_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a Slurm client, by default in an environment that is good for those that show something.

    One that is missing or hangs is an ordinary failure.
    """
    env = client_environment(os.environ) if environment is None else environment
    try:
        return subprocess.run(args, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(args, 127, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(args, 127, "", f"{args[0]}: {error.strerror}")


def on_cluster(cluster: str) -> list[str]:
    """Options with which a client asks one of several clusters; none where there is only one."""
    return ["-M", cluster] if cluster else []


def rows_of_queue(cluster: str = "") -> list[list[str]]:
    """[job id, state, path of the script, comment, name] of this user's jobs that have not ended.

    Raises:
        NotNow: the controller does not respond.
        LaunchError: squeue failed.
    """
    command = ["squeue", *on_cluster(cluster), "-h", "-u", str(os.getuid()), "-o", _TAB.join(_QUEUE_FIELDS)]
    done = run_command(command)
    if done.returncode != 0:
        what = f"`squeue` failed: {done.stderr.strip() or f'exit code {done.returncode}'}"
        raise (NotNow if is_away(done.stderr) else LaunchError)(what)
    return [row.split(_TAB) for row in done.stdout.split("\n") if _TAB in row]


def scancel(*job_ids: str, options: Sequence[str] = ()) -> None:
    """End jobs (`12`, `12_3;cluster`), or what the options say; those that have ended are left alone.

    Raises:
        NotNow: the controller does not respond.
        LaunchError: scancel failed.
    """
    for cluster in dict.fromkeys(job_id.partition(";")[2] for job_id in job_ids):
        numbers = [number for number, _, of in (job_id.partition(";") for job_id in job_ids) if of == cluster]
        command = ["scancel", *on_cluster(cluster), *options, *numbers]
        done = run_command(command)
        # scancel writes one line for each job that has ended.
        problems = [line for line in done.stderr.splitlines() if line.strip()]
        has_ended = bool(problems) and all(any(ended in line for ended in _HAS_ENDED) for line in problems)
        if done.returncode != 0 and not has_ended:
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            kind = NotNow if is_away(done.stderr) else LaunchError
            raise kind(f"scancel of job {numbers[0]}{more} failed: {done.stderr.strip()}", hint=" ".join(command))


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For squeue, sacct, scontrol, scancel: times are seconds since the epoch, lists of array elements are whole."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_BENDS_CLIENTS)}
    return kept | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def job_environment(environ: Mapping[str, str], said: Collection[str] = ()) -> dict[str, str]:
    """For a job: what this process has, but for the variables of a surrounding job and of its Prefect.

    Variables for options that a batch script sets (`said`) would win over them, so they stay for others only.
    """
    wanted = {f"SBATCH_{name.upper()}" for name in _WHO_AND_WHERE if name not in said} | _CLIENT_VARIABLES
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "PREFECT_")
    return {name: value for name, value in environ.items() if not name.startswith(foreign) or name in wanted}


def last_line(text: str) -> str:
    """What a client said last, which is why it failed."""
    return text.strip().splitlines()[-1] if text.strip() else ""
