"""Runs that benches profile and plan themselves, and ranks that train given StepPlans.

Ranks and scheduler do what they do in any run; the flow is left out. As the scheduler's module of ranks that took
`take_given_steps` this file publishes the plans of `give_steps`.
"""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop.cost.model import CostModel
from dflop.jobs import rank, supervisor
from dflop.records import StepObservation, StepPlan, from_dict, to_dict
from dflop.run import lifecycle
from dflop.run.directory import RunDir, open_run
from dflop.run.messages import say
from dflop.steps import planning, profiling, session
from dflop.steps.follow import Listener
from dflop.train import wire
from dflop.train.wire import PlanMessage
from tests.bench.figures import ROOT
from tests.jobs.configs import make_config
from tests.jobs.training import fresh, set_config
from tests.store.spooled import read_spool

START_PATIENCE_S = 60.0
"""For step plans that are published all at once: none may be replaced by a quick one."""
GIVEN = "replayed.json"


@dataclass(frozen=True)
class Profiled:
    """A run without a plan, its data and its modules profiled."""

    run: RunDir
    key: str
    """Of the model profile."""
    cost: CostModel
    profile_s: float
    """Wall seconds, of data and model."""


async def profiled_run(folder: Path, annotations: Path, num_processes: int, *overrides: str) -> Profiled:
    """Profile data and the demo's model from nothing, in jobs as any run does."""
    config = make_config(
        folder,
        f"model={ROOT}/configs/models/tiny_omni.yaml",
        f"cluster.num_processes_per_node={num_processes}",
        "cluster.memory_per_process_gib=3",
        f"dataset.annotations={annotations}",
        "train.trace_every_steps=0",
        *overrides,
    )
    run, _ = lifecycle.begin(config)
    config, began_s = run.config(), time.perf_counter()
    key = (await session.profiled(run, Listener(say))).profile_key
    cost = planning.cost_tables(run.run_id, config, key, profiling.specs_of(run), say)
    return Profiled(run, key, cost, time.perf_counter() - began_s)


def configured(profiled: RunDir, folder: Path, *overrides: str) -> RunDir:
    """A copy of a profiled run in another folder, with other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    run = fresh(profiled, folder)
    set_config(run, *overrides)
    return run


def observations(run: RunDir) -> dict[tuple[int, int], StepObservation]:
    """By (step, rank)."""
    return {(o.step, o.rank): o for o in read_spool(run.config().store, StepObservation)}


def give_steps(run: RunDir, steps: Sequence[StepPlan]) -> None:
    """Make a run train these steps, numbered anew, and nothing else."""
    numbered = [to_dict(dataclasses.replace(plan, step=step)) for step, plan in enumerate(steps)]
    (run.path / GIVEN).write_text(json.dumps(numbered))
    set_config(run, f"train.num_steps={len(steps)}")


def take_given_steps() -> None:
    """Makes this rank start the publisher below as its scheduler."""
    supervisor.SCHEDULER_MODULE = "tests.bench.jobs"
    supervisor.EXIT_S = 0.0  # who publishes them lives until it is ended
    rank.START_PATIENCE_S = START_PATIENCE_S


def publish_all(run_path: str, _mode: str, _attempt: str, host: str, port: str, _start: str) -> None:
    """Publish every plan at once, and live on: a scheduler that has ended would be started again."""
    run = open_run(run_path)
    store = wire.open_store(host, int(port), is_server=False, timeout_s=START_PATIENCE_S)
    for data in json.loads((run.path / GIVEN).read_text()):
        wire.publish(store, PlanMessage(from_dict(StepPlan, data), {}))
    signal.pause()


if __name__ == "__main__":
    publish_all(*sys.argv[1:])
