"""What is compared: the whole of dflop, and the plans that one has who does not look at the data.

`dflop` profiles data and modules, plans, packs every batch in a process beside training and corrects itself (gate on
`auto`, nothing learnt earlier). `tuned` has one layout for the whole model, in the manner of Megatron: of all that fit
the best by simulation on the same costs, as if somebody had tried them all. `blind` is what dflop's planner finds for
data in which every sample is the mean one; every module has processes of its own there, so that there is no such plan
with fewer processes than modules. Both train samples in the order they arrive, equally many to a microbatch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflop.errors import InfeasiblePlanError
from dflop.jobs import planning, profiling, runs, submit
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import GlobalBatches
from dflop.jobs.suite.judge import judge
from dflop.jobs.talk import Say
from dflop.plan.baselines.blind import blind_plan
from dflop.plan.baselines.uniform import tuned_uniform
from dflop.plan.rank import arrival_step_s, contention
from dflop.plan.space import Problem
from dflop.records import Plan, SampleShape
from dflop.schedule.scheduler import schedule_step
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from tests.bench.correct import replayed
from tests.bench.correct.real import configured
from tests.bench.endtoend.datasets import Files
from tests.jobs.configs import make_config

ROOT = Path(__file__).parents[3]
TUNED, BLIND, OURS = "tuned", "blind", "dflop"


@dataclass(frozen=True)
class Setup:
    """What dflop spends before training, on the clock on the wall; of one run, compilation of kernels left out."""

    data_profile_s: float
    model_profile_s: float
    plan_s: float

    @property
    def total_s(self) -> float:
        return self.data_profile_s + self.model_profile_s + self.plan_s


@dataclass(frozen=True)
class Profiled:
    """A run without a plan, its data and its modules profiled."""

    run: RunDir
    key: str
    """Of the model profile."""
    setup: Setup
    """Without the plan."""


def profiled_run(folder: Path, files: Files, num_processes: int, say: Say, *overrides: str) -> Profiled:
    """Profile data and modules from nothing, in jobs as any run does."""
    config = make_config(
        folder,
        f"model={ROOT}/configs/models/tiny_omni.yaml",
        f"cluster.num_processes_per_node={num_processes}",
        "cluster.memory_per_process_gib=3",
        f"dataset.annotations={files.annotations}",
        f"dataset.media_root={files.media_root}",
        f"dataset.tokenizer={files.tokenizer}",
        "dataset.max_llm_tokens=4096",
        "data_profile.max_bad_frac=0.05",  # a clip of the media folder is a breath longer than the encoder takes
        "train.trace_every_steps=0",
        "train.checkpoint_every=1000000",
        "train.timeout_s=600",
        *overrides,
    )
    run, _ = runs.begin(config)
    return asyncio.run(_profile(run, say))


async def _profile(run: RunDir, say: Say) -> Profiled:
    config = run.config()
    launcher, began_s = submit.launcher_of(run, config), time.perf_counter()
    data = await profiling.data_profile(run, launcher, say)
    with Reader(config.store) as reader:
        run.write_shapes(reader.shapes(data.profile_key))
    data_profiled_s = time.perf_counter()
    key = await profiling.model_profile(run, launcher, say)
    planning.cost_tables(run, config, key, say)
    setup = Setup(data_profiled_s - began_s, time.perf_counter() - data_profiled_s, 0.0)
    return Profiled(run, key, setup)


@dataclass(frozen=True)
class Arm:
    """One way to train, ready to be started."""

    name: str
    run: RunDir
    plan: Plan
    simulated_s: tuple[float, ...]
    """Of every step, simulated before training."""
    has_scheduler: bool
    """Whether step plans are made while it trains; they lie in the run directory otherwise."""


@dataclass(frozen=True)
class Contest:
    """All arms of one seed: the same initial weights, the same global batches in the same order."""

    arms: tuple[Arm, ...]
    batches: tuple[tuple[SampleShape, ...], ...]
    setup: Setup


def make_contest(profiled: Profiled, folder: Path, seed: int, num_steps: int, say: Say) -> Contest:
    """Plan for every arm; each has a run directory and a store of its own.

    Raises:
        InfeasiblePlanError: nothing fits, or no uniform plan does.
    """
    settings = (f"train.seed={seed}", f"model.seed={seed}", f"train.num_steps={num_steps}")
    ours = configured(profiled.run, _folder(folder, OURS), *settings)
    config, began_s = ours.config(), time.perf_counter()
    task = planning.planning_task(ours, config, profiled.key, say)
    plan = planning.find_plans(task, config, say)[0]
    planning.keep_plans(ours, config, task, [plan])
    ingest(config.store)
    setup = replace(profiled.setup, plan_s=time.perf_counter() - began_s)
    drawn = GlobalBatches(config, ours.shapes())
    batches = tuple(tuple(drawn.at(step)) for step in range(num_steps))
    arms = [Arm(OURS, ours, plan, _simulated_s(task.problem, plan, batches, "balanced"), has_scheduler=True)]
    for name, of_arm in data_blind_plans(task.problem).items():
        run = configured(profiled.run, _folder(folder, name), *settings)
        arms.append(_blind_arm(name, run, of_arm, task.problem, batches))
    return Contest(tuple(arms), batches, setup)


def data_blind_plans(problem: Problem) -> dict[str, Plan]:
    """By name; a plan that does not exist is left out.

    Raises:
        InfeasiblePlanError: no uniform plan fits.
    """
    tuned = tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))
    if tuned is None:
        raise InfeasiblePlanError(f"no uniform plan fits on {problem.cluster.name}")
    try:
        return {TUNED: tuned, BLIND: blind_plan(problem)}
    except InfeasiblePlanError:
        return {TUNED: tuned}


def _folder(folder: Path, name: str) -> Path:
    found = folder / name
    found.mkdir(parents=True)
    return found


def _blind_arm(name: str, run: RunDir, plan: Plan, problem: Problem, batches: Sequence[Sequence[SampleShape]]) -> Arm:
    run.write_plan(plan, planning.tables_of(plan, problem.cost))
    limit = contention(problem, plan)
    replayed.give_steps(
        run,
        [
            schedule_step(
                run_id=run.run_id, step=step, plan=plan, batch=batch, cost=problem.cost, policy="arrival",
                max_concurrency=limit,
            )
            for step, batch in enumerate(batches)
        ],
    )  # fmt: skip
    return Arm(name, run, plan, _simulated_s(problem, plan, batches, "arrival"), has_scheduler=False)


def _simulated_s(
    problem: Problem, plan: Plan, batches: Sequence[Sequence[SampleShape]], policy: str
) -> tuple[float, ...]:
    return judge(plan, batches, problem.cost, problem.cluster, policy).step_s
