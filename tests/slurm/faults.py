"""What the tests of faults share: a run with a rank on each of two nodes that trains for as long as they like."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflop.launch import JobHandle, Journal
from dflop.records import LLM, StepObservation
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.steps import submit
from dflop.steps.planning import bound_family
from tests.jobs.configs import write_sections
from tests.jobs.training import NARROW_OMNI, give_plan, planned_run
from tests.launch.helpers import REPO, Background, live, until
from tests.store.spooled import read_spool
from tests.train.synthetic import make_plan

FOR_EVER = 100_000
SETTINGS = (
    "cluster.backend=slurm", "cluster.hardware=test", "cluster.num_nodes=2", "cluster.num_processes_per_node=1",
    "cluster.num_cores_per_node=4", "cluster.memory_per_process_gib=2", "cluster.slurm.poll_interval_s=0.5",
    "cluster.slurm.time_limit_min=30", f"cluster.slurm.setup=['export PYTHONPATH={REPO}']",
    f"train.num_steps={FOR_EVER}", "train.checkpoint_every=5", "train.timeout_s=60", "replan.mode=off",
    "replan.check_every_s=1", "compare.num_batches=0", "correct.enabled=false",
)  # fmt: skip


def write_config(folder: Path, name: str, *, slurm: dict[str, Any], memory_gib: float = 2, **sections: Any) -> None:
    """`run.yaml` of a folder with the demo's data: two nodes with two processes each, for jobs from profiles on."""
    setup = [f"export PYTHONPATH={REPO}"]
    cluster = {
        "name": "test", "backend": "slurm", "hardware": "test", "num_nodes": 2, "num_processes_per_node": 2,
        "num_cores_per_node": 4, "memory_per_process_gib": memory_gib,
        "slurm": {"poll_interval_s": 0.5, "setup": setup, **slurm},
    }  # fmt: skip
    write_sections(folder, name, NARROW_OMNI, cluster=cluster, **sections)


def run_on_two_nodes(folder: Path, *settings: str, num_replicas: int = 1) -> RunDir:
    """Few ranks, for each imports torch anew; corrections are off, so that a step done twice is packed as it was."""
    run = planned_run(folder, *SETTINGS, *settings)
    grid = {"vision": (1, num_replicas), LLM: (1, num_replicas)}
    give_plan(run, make_plan(grid, num_microbatches=2, of=bound_family(run.config())))
    return run


def observations(run: RunDir) -> list[StepObservation]:
    return sorted(read_spool(run.config().store, StepObservation), key=lambda o: (o.step, o.rank, o.attempt))


def train_job(run: RunDir) -> JobHandle | None:
    """The training job that has not been seen to end."""
    return live(Journal(run.path, run.run_id), submit.train_key(run, TRAIN))


def log_of(handle: JobHandle, rank: int = 0) -> str:
    path = handle.path(f"{rank}_log.err")
    return path.read_text(errors="replace") if path.exists() else ""


def steps_in(log: str) -> int:
    """Steps that rank 0 has told of, over all starts of the job."""
    return log.count(f"/{FOR_EVER} ")


def gets_on(handle: JobHandle, by: int = 3, limit_s: float = 120) -> None:
    """Returns once the job has made some more steps."""
    before = steps_in(log_of(handle))
    until(lambda: steps_in(log_of(handle)) >= before + by, what=f"{by} more steps of {handle}", limit_s=limit_s)


def shown(job_id: str, field: str) -> str:
    """A field of what Slurm knows about a job; empty when it knows none, or does not answer."""
    done = subprocess.run(["scontrol", "-o", "show", "job", job_id], capture_output=True, text=True, check=False)
    return done.stdout.partition(f"{field}=")[2].partition(" ")[0].strip()


def end_of(job_id: str, limit_s: float = 60) -> str:
    """The job's final state. (sbatch --wait would look ever less often, 32 s apart in the end.)"""

    def final_state() -> str:
        state = shown(job_id, "JobState")
        return "" if state in ("PENDING", "RUNNING", "COMPLETING") else state

    return until(final_state, what=f"job {job_id} to end", limit_s=limit_s)


def make_environment(folder: Path, **variables: str) -> None:
    """A `.venv` as the files in slurm/ activate it: `dflop` of the environment, with this checkout's code."""
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    (activate.parent / "dflop").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dflop.cli "$@"\n')
    (activate.parent / "dflop").chmod(0o755)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    path = f"{shlex.quote(str(activate.parent))}:{shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    activate.write_text("\n".join([*lines, f"export PATH={path}"]) + "\n")


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def pid_of(handle: JobHandle, rank: int) -> int:
    """Of a rank: all nodes are this machine."""
    return int(handle.path(f"{rank}.pid").read_text().split()[0])


def processes(text: str) -> list[int]:
    """Live processes that have the text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "cmdline").read_bytes().replace(b"\0", b" "):
                    found.append(int(entry.name))
    return found


class Drivers:
    """Starts drivers of a run, one after the other."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.all = run, list[Background]()

    def start(self) -> Background:
        log = self.run.path / f"driver-{len(self.all)}.log"
        self.all.append(Background("tests.slurm.driver", str(self.run.path), log=log))
        return self.all[-1]

    @property
    def last(self) -> Background:
        return self.all[-1]

    def stop(self) -> None:
        """Ends them and the jobs of the run, whatever a test has left."""
        for driver in self.all:
            if driver.process.poll() is None:
                driver.kill()
        subprocess.run(["scancel", f"--name={self.run.run_id}-train"], check=False)
        until(lambda: not processes(str(self.run.path)), what="every process of the run to end", limit_s=60)


def strays(found: Sequence[StepObservation]) -> dict[int, list[float]]:
    """Losses of steps in which ranks or starts disagree: more than sums that are made in another order would."""
    losses: dict[int, list[float]] = {}
    for o in found:
        losses.setdefault(o.step, []).append(o.loss)
    return {step: values for step, values in losses.items() if max(values) - min(values) > 1e-4 * abs(max(values))}
