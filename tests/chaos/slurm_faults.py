"""Faults of a Slurm cluster, the tests' own: jobs that are cancelled, nodes that go, a controller that dies.

Drivers die there, too: those faults of `faults.py` that know no launcher are drawn as well.
"""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from functools import partial
from signal import SIGKILL
from typing import Any

from tests.chaos import faults
from tests.chaos.faults import End, Fault, by
from tests.chaos.play import Play
from tests.chaos.stage import REPO
from tests.chaos.strikes import rank, send, some
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
    return some(play.pid_files(name), f"job of {name}")[-1].name.removesuffix("_0.pid")


def _to_job(play: Play, job: str, *command: str) -> None:
    slurm(*command, job_of(play, job))


def _node_down(play: Play) -> None:
    """A node of the training is down, and break-even after some seconds."""
    nodes = some(slurm("squeue", "-h", "-o", "%N", "-j", job_of(play, "train")), "node of the training")
    node = slurm("scontrol", "show", "hostnames", nodes).split()[-1]
    for state in ("drain", "down"):
        slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=chaos")
    play.later(6.0, lambda: slurm("scontrol", "update", f"nodename={node}", "state=resume"))


def _preempt(play: Play) -> None:
    """Somebody with a higher priority takes all nodes for three seconds."""
    job_of(play, "train")
    slurm("sbatch", "--partition=debug", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")


def _stepd(play: Play, job: str) -> int:
    return some(processes(f"slurmstepd: [{job_of(play, job)}.0]"), "slurmstepd")[0]


def _for_a_while(play: Play, seconds: float, call: Callable[[str], object], off: str, on: str) -> None:
    call(off)
    play.later(seconds, lambda: call(on))


_controller = partial(cluster_script, "controller")
_partition = partial(slurm, "scontrol", "update", "partitionname=low")
_ANYWHERE = ("driver killed", "Ctrl-C", "SIGTERM", "dflop cancel", "a second driver", "driver dies", "scheduler")
_CANCELLED, _DIED = (End(5, "cancelled"),), (End(5, "died (signal 9)"),)
_slurm = partial(Fault, part="slurm")
FAULTS = (
    _slurm("training cancelled by scancel", "training", by(_to_job, "train", "scancel"), _CANCELLED, "rank"),
    _slurm("probing cancelled by scancel", "probing", by(_to_job, "profile-tp1", "scancel"), _CANCELLED, "rank"),
    _slurm("shard cancelled by scancel", "profiling data", by(_to_job, "data", "scancel"), _CANCELLED, "rank"),
    _slurm("rank killed on its node", "training", by(send, rank, "train", SIGKILL), _DIED, "rank"),
    _slurm("training requeued", "training", by(_to_job, "train", "scontrol", "requeue"), (), "rank"),
    _slurm("node down for 6 s", "training", _node_down, (), "rank"),
    _slurm("training preempted", "training", _preempt, (), "rank"),
    _slurm("slurmstepd killed", "training", by(send, _stepd, "train", SIGKILL), (), "rank"),
    _slurm("slurmctld killed, break-even after 10 s", "training", by(_for_a_while, 10.0, _controller, "kill", "start")),
    _slurm("partition down for 6 s", "starting", by(_for_a_while, 6.0, _partition, "state=down", "state=up")),
    *(fault for fault in faults.ENGINE if fault.name.startswith(_ANYWHERE)),
)
