"""Slurm's words for what it refuses or keeps waiting for ever, and the keys of a configuration that decide it.

The same limit has a sentence (sbatch refuses the job), a reason (the job waits) or only a number in sinfo (the doctor
compares): all three lead to one row here. Slurm adds `accounting/QOS policy` to whatever it refuses for a limit, so
words for a limit come before those for an account or a QOS.
"""

from __future__ import annotations

import re
from typing import NamedTuple

KEYS = {
    "account": "cluster.slurm.account",
    "any limit": "cluster.slurm.time_limit_min, cluster.num_nodes, data_profile.num_shards against the limits of the "
    "account and the QOS (`sacctmgr show qos`, `sacctmgr show assoc`)",
    "constraint": "cluster.slurm.constraint",
    "cpus": "cluster.num_processes_per_node, cluster.num_cores_per_node; of the data profile data_profile.num_workers",
    "dependency": "cluster.slurm.extra, `dependency`",
    "fewer": "cluster.num_nodes, cluster.num_processes_per_node: request fewer, or cluster.slurm.qos",
    "gpus": "cluster.num_processes_per_node, cluster.slurm.gpu_type",
    "gres": "cluster.slurm.gpus, cluster.slurm.gpu_type",
    "jobs": "data_profile.num_shards: fewer, larger jobs",
    "memory": "cluster.memory_per_process_gib, cluster.num_processes_per_node, or cluster.slurm.ask_for_memory: false",
    "memory option": "cluster.slurm.ask_for_memory: false, where the site requires memory per CPU or GPU",
    "nodes": "cluster.num_nodes",
    "partition": "cluster.slurm.partition",
    "qos": "cluster.slurm.qos",
    "reservation": "cluster.slurm.extra, `reservation` (`scontrol show reservation`)",
    "shape": "cluster.num_nodes, cluster.num_processes_per_node",
    "time": "cluster.slurm.time_limit_min",
}
"""Keys of a configuration, by what they decide."""


class Refusal(NamedTuple):
    """What Slurm means."""

    words: str
    """Pattern of a sentence of sbatch or of a reason of squeue."""
    what: str
    key: str
    """One of `KEYS`; empty: `what` says it."""
    is_for_ever: bool = True
    """A job that waits for this reason never starts."""

    @property
    def keys(self) -> str:
        return KEYS.get(self.key, self.what)

    def __str__(self) -> str:
        return f"{self.what}: see {self.keys}" if self.key else self.what


_TABLE = (
    Refusal(r"(Max|Grp)\w*Submit", "its account or QOS allows no more jobs at a time", "jobs", is_for_ever=False),
    Refusal(r"(QOS|Assoc)Max\w*Wall", "its time limit is above that of its account or QOS", "time"),
    Refusal("PartitionTimeLimit|time limit is", "its time limit is above the partition's", "time"),
    Refusal(r"(QOS|Assoc)Max\w*Per(Job|Node)", "its account or QOS does not allow that much per job", "fewer"),
    Refusal(r"(QOS|Assoc)Min", "its QOS requires a larger job", "qos"),
    Refusal(r"(QOS|Assoc)(Max|Grp)\w*Jobs", "its account or QOS runs no more at a time", "jobs", is_for_ever=False),
    Refusal(r"(QOS|Assoc)(Max|Grp)", "its account or QOS has that much in use", "fewer", is_for_ever=False),
    Refusal("violates accounting/QOS policy", "it is above a limit of its account or QOS", "any limit"),
    Refusal("PartitionNodeLimit|node count", "it requests more nodes than the partition allows per job", "nodes"),
    Refusal("mutually exclusive", "sbatch takes one option for memory", "memory option"),
    Refusal("MaxMemPerLimit|memory", "it requests more memory than one job may have", "memory"),
    Refusal("ReservationDeleted|InvalidReservation|reservation is invalid|denied to requested reservation",
            "its reservation is over, or not open to it", "reservation"),
    Refusal("AccountNotAllowed", "its account may not use the partition", "account"),
    Refusal("QOSNotAllowed", "its QOS may not use the partition", "qos"),
    Refusal("invalid.?account", "Slurm knows no such account", "account"),
    Refusal("invalid.?qos", "Slurm knows no such QOS", "qos"),
    Refusal("BadConstraints", "no node has the requested resources", "shape"),
    Refusal("feature", "no node has the requested features", "constraint"),
    Refusal("generic resource|gres", "no node has the requested GPUs", "gres"),
    Refusal("node configuration|more processors", "no node has the requested resources", "shape"),
    Refusal("array specification", "an array has too many elements (MaxArraySize)", "jobs"),
    Refusal("DependencyNeverSatisfied|dependency problem", "the job it depends on failed", "dependency"),
    Refusal("launch.failed.requeued.held", "its launch failed and it is held: make sure that its nodes see its folder, "
            "then `scontrol release` it", ""),
    Refusal("partition", "the partition is not there, down or not open to it", "partition", is_for_ever=False),
    Refusal("account", "its account may not do that", "account", is_for_ever=False),
    Refusal("qos", "its QOS may not do that", "qos", is_for_ever=False),
)  # fmt: skip


def refusal(said: str) -> Refusal | None:
    """What Slurm means with a sentence or a reason; None: it is in no table."""
    return next((row for row in _TABLE if re.search(row.words, said, re.IGNORECASE)), None)


def keys_of_refusal(said: str) -> str:
    """Keys of the configuration to look at when sbatch refuses a job in these words."""
    found = refusal(said)
    return found.keys if found else "the cluster section"
