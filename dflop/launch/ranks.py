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
        LaunchError: the task was not started by srun, or `scontrol` cannot expand the node list.
    """
    if "SLURM_PROCID" not in environ:
        raise LaunchError(
            "neither RANK nor SLURM_PROCID is set",
            where="environment",
            hint="start the tasks with srun or torchrun, see slurm/train.sbatch",
        )
    node_rank = int(environ["SLURM_NODEID"])
    return rank_environment(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_NTASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node_rank],
        node_rank=node_rank,
        # The step's nodes, not the job's: srun may leave nodes of its job out.
        master_addr=environ.get("MASTER_ADDR") or _first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=int(environ.get("MASTER_PORT") or port_of_job(environ["SLURM_JOB_ID"])),
    )


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
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"cannot read Slurm's task counts `{text}`", where="SLURM_STEP_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(node_list: str) -> str:
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise LaunchError(
            f"`{' '.join(command)}` gives no host: {error}", hint="export MASTER_ADDR in the batch script"
        ) from error
