"""The variables by which a task of a distributed job learns its place.

Launched jobs get them from the payload. A task that a person started with `srun` has only Slurm's own words for the
same things; `srun_environment` translates. torchrun sets the variables itself.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from dflop.errors import LaunchError

FIRST_PORT = 12000
NUM_PORTS = 20000
"""Below 32768, where Linux hands out ephemeral ports."""
_MAX_TASKS = 10_000_000


def rank_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
) -> dict[str, str]:
    """The variables `torch.distributed.init_process_group("env://")` and torchrun scripts expect."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The rank variables of a task that `srun` started, from Slurm's.

    Args:
        environ: The task's environment. A MASTER_ADDR or MASTER_PORT in it is kept: scripts set them where the
            node's name leads to the wrong network.

    Raises:
        LaunchError: the task was not started by srun, a variable is no number or does not fit the others, or
            `scontrol` cannot expand the node list.
    """
    if "SLURM_PROCID" not in environ:
        raise LaunchError(
            "neither RANK nor SLURM_PROCID is set",
            where="environment",
            hint="start the tasks with srun or torchrun, see slurm/train.sbatch",
        )
    world_size = _number(environ, "SLURM_NTASKS", _MAX_TASKS)
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node_rank = _number(environ, "SLURM_NODEID", len(counts))
    given_port = environ.get("MASTER_PORT")
    return rank_environment(
        rank=_number(environ, "SLURM_PROCID", world_size),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", counts[node_rank]),
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        # The step's nodes, not the job's: srun may leave nodes of its job out.
        master_addr=environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", "")),
        master_port=_number(environ, "MASTER_PORT", 2**16, least=1)
        if given_port
        else port_of_job(str(_number(environ, "SLURM_JOB_ID", 2**63))),
    )


def _number(environ: Mapping[str, str], name: str, end: int, *, least: int = 0) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not least <= int(text) < end:
        raise LaunchError(
            f"{name} is `{text[:60]}`, expected a number from {least} and below {end}",
            where="environment",
            hint="start the tasks with srun, and leave its variables as they are",
        )
    return int(text)


def port_of_job(job_id: str) -> int:
    """A port that all tasks of a job agree on without talking, and neighbours on shared nodes do not."""
    return FIRST_PORT + int(job_id) % NUM_PORTS


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
        raise LaunchError(
            f"`{' '.join(command)}` gives no host: {error}", hint="export MASTER_ADDR in the batch script"
        ) from error
