"""Faults of a Slurm cluster, the tests' own: jobs that are cancelled, nodes that go, a controller that dies.

Drivers die there, too: those faults of `engine_faults.py` that know no launcher are drawn as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from tests.chaos import engine_faults
from tests.chaos.fault import Deed, End, Fault, NothingToStrike
from tests.chaos.play import Play
from tests.chaos.stage import REPO
from tests.slurm.conftest import TURN, cluster_script
from tests.slurm.faults import processes, slurm

CHANGES: dict[str, dict[str, Any]] = {
    "cluster": {
        "backend": "slurm", "hardware": "test", "num_nodes": 2, "num_processes_per_node": 1, "num_cores_per_node": 4,
        "memory_per_process_gib": 2,
        "slurm": {
            "poll_interval_s": 0.5, "time_limit_min": 30, "partition": "low", "setup": [f"export PYTHONPATH={REPO}"]
        },
    }
}  # fmt: skip
"""To the configuration of every run."""
NODE_BACK_S, CONTROLLER_BACK_S = 6.0, 10.0
_CANCELLED = End(5, "cancelled")


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """The cluster, for nobody else; it is down afterwards if it was down before.

    Raises:
        RuntimeError: it does not start.
    """
    with TURN.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        was_up = cluster_script("status").returncode == 0
        up = cluster_script("up")
        try:
            if up.returncode:
                raise RuntimeError(f"the test cluster did not start:\n{up.stdout}")
            yield
        finally:
            if not was_up:
                cluster_script("down")


def mend() -> None:
    """Before a run: Slurm's own daemons crash, too, if seldom, and a node less is a fault that nobody drew.

    Raises:
        RuntimeError: a node does not come back.
    """
    done = cluster_script("mend")
    if done.returncode:
        raise RuntimeError(f"the test cluster has lost a node:\n{done.stdout}")


def job_of(play: Play, name: str) -> str:
    """Slurm's id of the newest job of a folder that has begun."""
    files = play.files_of(name, "*_0.pid")
    if not files:
        raise NothingToStrike(f"no job of {name}")
    return files[-1].name.removesuffix("_0.pid")


def scancel(name: str) -> Deed:
    return lambda play: _say("scancel", job_of(play, name))


def requeue(play: Play) -> None:
    _say("scontrol", "requeue", job_of(play, "train"))


def node_down(play: Play) -> None:
    """A node of the training is down, and back after some seconds."""
    nodes = slurm("squeue", "-h", "-o", "%N", "-j", job_of(play, "train"))
    if not nodes:
        raise NothingToStrike("the training has no node")
    node = slurm("scontrol", "show", "hostnames", nodes).split()[-1]
    for state in ("drain", "down"):
        slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=chaos")
    play.later(NODE_BACK_S, lambda: _say("scontrol", "update", f"nodename={node}", "state=resume"))


def kill_controller(play: Play) -> None:
    """slurmctld is killed, and started again after some seconds."""
    cluster_script("controller", "kill")
    play.later(CONTROLLER_BACK_S, _start_controller)


def _start_controller() -> None:
    cluster_script("controller", "start")


def preempt(play: Play) -> None:
    """Somebody with a higher priority takes all nodes for three seconds."""
    job_of(play, "train")
    command = ["sbatch", "--parsable", "--partition=debug", "--nodes=4", "--exclusive", "--output=/dev/null"]
    _say(*command, "--wrap=sleep 3")


def kill_stepd(play: Play) -> None:
    found = processes(f"slurmstepd: [{job_of(play, 'train')}.0]")
    if not found:
        raise NothingToStrike("no slurmstepd")
    os.kill(found[0], signal.SIGKILL)


def partition_down(play: Play) -> None:
    """Nothing that is queued starts for some seconds."""
    _say("scontrol", "update", "partitionname=low", "state=down")
    play.later(NODE_BACK_S, lambda: _say("scontrol", "update", "partitionname=low", "state=up"))


def _say(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NothingToStrike(f"{' '.join(command)}: {done.stderr.strip()}")


def _on_slurm(title: str, when: str, deed: Deed, *ends: End) -> Fault:
    return Fault(title, "slurm", when, deed, ends, excludes="rank")


_ANYWHERE = ("driver killed", "Ctrl-C", "SIGTERM", "dflop cancel", "a second driver", "driver dies", "scheduler")

FAULTS = (
    _on_slurm("training cancelled by scancel", "training", scancel("train"), _CANCELLED),
    _on_slurm("probing cancelled by scancel", "probing", scancel("profile-tp1"), _CANCELLED),
    _on_slurm("shard cancelled by scancel", "profiling_data", scancel("data"), _CANCELLED),
    _on_slurm("rank killed on its node", "training", engine_faults.to_rank(signal.SIGKILL), End(5, "died (signal 9)")),
    _on_slurm("training requeued", "training", requeue),
    _on_slurm("node down for 6 s", "training", node_down),
    _on_slurm("training preempted", "training", preempt),
    _on_slurm("slurmstepd killed", "training", kill_stepd),
    Fault("slurmctld killed, back after 10 s", "slurm", "training", kill_controller),
    Fault("partition down for 6 s", "slurm", "starting", partition_down),
    *(fault for fault in engine_faults.FAULTS if fault.name.startswith(_ANYWHERE)),
)
