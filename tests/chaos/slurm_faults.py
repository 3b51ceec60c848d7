"""Faults of a Slurm cluster, the tests' own: jobs that are cancelled, nodes that go, a controller that dies.

Drivers die there, too: those faults of `faults.py` that know no launcher are drawn as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from signal import SIGKILL
from typing import Any

from tests.chaos import faults, strikes
from tests.chaos.fault import End, Fault, NothingToStrike
from tests.chaos.faults import by
from tests.chaos.play import Play
from tests.chaos.stage import REPO
from tests.slurm.conftest import TURN, cluster_script
from tests.slurm.faults import processes, slurm

CHANGES: dict[str, dict[str, Any]] = {"cluster": {
    "backend": "slurm", "hardware": "test", "num_nodes": 2, "num_processes_per_node": 1, "num_cores_per_node": 4,
    "memory_per_process_gib": 2, "slurm": {
        "poll_interval_s": 0.5, "time_limit_min": 30, "partition": "low", "setup": [f"export PYTHONPATH={REPO}"],
    },
}}  # fmt: skip
"""To the configuration of every run."""


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """The cluster, for nobody else; it is down afterwards if it was down before."""
    with TURN.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        was_up = cluster_script("status").returncode == 0
        try:
            cluster_is("up")
            yield
        finally:
            if not was_up:
                cluster_script("down")


def cluster_is(word: str) -> None:
    """`up`; `mend`: Slurm's own daemons crash, too, if seldom, and a node less is a fault that nobody drew."""
    done = cluster_script(word)
    if done.returncode:
        raise RuntimeError(f"the test cluster, {word}:\n{done.stdout}")


def job_of(play: Play, name: str) -> str:
    """Slurm's id of the newest job of a folder that has begun."""
    files = play.pid_files(name)
    if not files:
        raise NothingToStrike(f"no job of {name}")
    return files[-1].name.removesuffix("_0.pid")


def _to_job(play: Play, job: str, *command: str) -> None:
    slurm(*command, job_of(play, job))


def _node_down(play: Play) -> None:
    """A node of the training is down, and back after some seconds."""
    nodes = slurm("squeue", "-h", "-o", "%N", "-j", job_of(play, "train"))
    if not nodes:
        raise NothingToStrike("the training has no node")
    node = slurm("scontrol", "show", "hostnames", nodes).split()[-1]
    for state in ("drain", "down"):
        slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=chaos")
    play.later(6.0, lambda: slurm("scontrol", "update", f"nodename={node}", "state=resume"))


def _preempt(play: Play) -> None:
    """Somebody with a higher priority takes all nodes for three seconds."""
    job_of(play, "train")
    slurm("sbatch", "--partition=debug", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")


def _kill_stepd(play: Play) -> None:
    found = processes(f"slurmstepd: [{job_of(play, 'train')}.0]")
    if not found:
        raise NothingToStrike("no slurmstepd")
    os.kill(found[0], SIGKILL)


def _kill_controller(play: Play) -> None:
    cluster_script("controller", "kill")
    play.later(10.0, lambda: cluster_script("controller", "start"))


def _partition_down(play: Play) -> None:
    """Nothing that is queued starts for some seconds."""
    slurm("scontrol", "update", "partitionname=low", "state=down")
    play.later(6.0, lambda: slurm("scontrol", "update", "partitionname=low", "state=up"))


_ANYWHERE = ("driver killed", "Ctrl-C", "SIGTERM", "dflop cancel", "a second driver", "driver dies", "scheduler")
_CANCELLED, _DIED = (End(5, "cancelled"),), (End(5, "died (signal 9)"),)
_slurm = partial(Fault, part="slurm")
FAULTS = (
    _slurm("training cancelled by scancel", "training", by(_to_job, "train", "scancel"), _CANCELLED, "rank"),
    _slurm("probing cancelled by scancel", "probing", by(_to_job, "profile-tp1", "scancel"), _CANCELLED, "rank"),
    _slurm("shard cancelled by scancel", "profiling data", by(_to_job, "data", "scancel"), _CANCELLED, "rank"),
    _slurm("rank killed on its node", "training", by(strikes.send, strikes.rank, "train", SIGKILL), _DIED, "rank"),
    _slurm("training requeued", "training", by(_to_job, "train", "scontrol", "requeue"), (), "rank"),
    _slurm("node down for 6 s", "training", _node_down, (), "rank"),
    _slurm("training preempted", "training", _preempt, (), "rank"),
    _slurm("slurmstepd killed", "training", _kill_stepd, (), "rank"),
    _slurm("slurmctld killed, back after 10 s", "training", _kill_controller),
    _slurm("partition down for 6 s", "starting", _partition_down),
    *(fault for fault in faults.ENGINE if fault.name.startswith(_ANYWHERE)),
)
