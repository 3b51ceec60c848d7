"""The whole loop as a Prefect flow: demo data -> data profile -> model profile -> plan -> train -> compare -> summary.

Planning and training take turns: for every stage, and whenever another plan pays (`dflop/jobs/continuing.py`). The
flow watches and records; it owns nothing. Jobs are journalled before anybody waits, profiles are looked up in the store
before anything is submitted, training resumes from its checkpoint: run it again after any crash and it goes on.
Deploy by path: `flows/pipeline.py:pipeline`.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from dflop.config import load_config
from dflop.data.demo import make_demo_dataset
from dflop.data.distribution import shapes_frame, summary
from dflop.errors import DflopError, InfrastructureError, Interrupted, StoreError
from dflop.jobs import continuing, profiling, results, runs, submit
from dflop.jobs.continuing import Todo
from dflop.jobs.follow import follow_job, ingest_run
from dflop.jobs.preflight import preflight
from dflop.jobs.replan import Advice
from dflop.jobs.rounds import Teller
from dflop.jobs.rundir import RunDir, rules_of
from dflop.jobs.steps import COMPARE
from dflop.launch import Launcher
from dflop.report.history import markdown_history
from dflop.report.terminal import markdown_plan, markdown_summary
from dflop.store.ingest import ingest
from dflop.store.reader import Reader


def _failed_with_the_machine(_task: Any, _run: Any, state: Any) -> bool:
    """Retry what the cluster did to a job, never what the job did to itself."""
    return isinstance(state.data, InfrastructureError)


# The store knows what is done, under keys that cover code, hardware and data; Prefect's cache does not.
_STEP: dict[str, Any] = {"tags": ["dflop"], "cache_policy": NO_CACHE}
_JOB_STEP = _STEP | {"retries": 2, "retry_delay_seconds": 5, "retry_condition_fn": _failed_with_the_machine}


@flow(name="dflop-pipeline", flow_run_name="{config_path}", log_prints=False)
async def pipeline(config_path: str, overrides: list[str] | None = None) -> str | State[str]:
    """Run, or go on with, the pipeline of a configuration file.

    Args:
        config_path: YAML file.
        overrides: `a.b=value` strings.

    Returns:
        The run directory.
    """
    config = load_config(Path(config_path), overrides or [])
    preflight(config, Path(config_path))
    run, is_resumed = runs.begin(config)
    key, config = config.key, run.config()
    say = get_run_logger().info
    say(f"{'resuming' if is_resumed else 'starting'} run {run.run_id} in {run.path}")
    runs.note(run, config, runs.RUNNING, config_key=key)
    launcher = submit.launcher_of(run, config)
    try:
        if config.dataset.demo:
            await demo_data(run)
        await data_profile(run, launcher)
        model_key = await model_profile(run, launcher)
        teller, advice = Teller(run, say, functools.partial(show_history, run)), None
        while (todo := await asyncio.to_thread(continuing.what_next, run, launcher)) is not Todo.NOTHING:
            if todo is Todo.PLAN:
                await plan(run, model_key, advice, teller)
                advice = None
            else:
                advice = await train(run, launcher, teller)
        if config.compare.num_batches:
            await compare(run, launcher)
    except DflopError as error:
        state = runs.INTERRUPTED if isinstance(error, Interrupted) else runs.FAILED
        runs.note(run, config, state, config_key=key)
        if not isinstance(error, StoreError):
            await asyncio.to_thread(ingest, config.store)
        # A state, not a raise: Prefect would log a traceback above a message that already says what to do.
        return Failed(message=error.what, data=error)
    runs.note(run, config, runs.DONE, config_key=key)
    await summarise(run)
    return str(run.path)


@task(name="demo-data", **_STEP)
async def demo_data(run: RunDir) -> None:
    """Build the demo dataset unless it is there."""
    d, rules, say = run.config().dataset, rules_of(run.config()), get_run_logger().info
    await asyncio.to_thread(make_demo_dataset, d.annotations.parent, d.demo_num_samples, progress=say, rules=rules)


@task(name="data-profile", **_JOB_STEP)
async def data_profile(run: RunDir, launcher: Launcher) -> None:
    """Shapes of every sample, from the store or from jobs over shards; healthy ones go to the run directory."""
    config, say = run.config(), get_run_logger().info
    found = await profiling.data_profile(run, launcher, say)
    with Reader(config.store) as reader:
        shapes = reader.shapes(found.profile_key)
    run.write_shapes(shapes)
    say(f"{len(shapes)} healthy samples, {found.num_quarantined} quarantined\n{summary(shapes_frame(shapes))}")


@task(name="model-profile", **_JOB_STEP)
async def model_profile(run: RunDir, launcher: Launcher) -> str:
    """Measurements of every module, from the store or from jobs; returns the profile's key."""
    return await profiling.model_profile(run, launcher, get_run_logger().info)


@task(name="plan", **_STEP)
async def plan(run: RunDir, model_key: str, advice: Advice | None, teller: Teller) -> None:
    """Choose layout and number of microbatches for what comes next."""
    say = get_run_logger().info
    plans = await asyncio.to_thread(continuing.plan_next, run, model_key, advice, say)
    if plans:
        say(f"plan: {plans[0].reason}")
        await acreate_markdown_artifact(markdown_plan(plans), key="dflop-plan", description=plans[0].reason)
    await teller.tell()


@task(name="train", **_JOB_STEP)
async def train(run: RunDir, launcher: Launcher, teller: Teller) -> Advice | None:
    """Train to the end of the stage, or until another plan pays, which is returned."""
    return await continuing.train_once(run, launcher, get_run_logger().info, teller)


@task(name="compare", **_JOB_STEP)
async def compare(run: RunDir, launcher: Launcher) -> None:
    """Train the first batches under both policies."""
    say = get_run_logger().info
    await follow_job(run, launcher, submit.train_job(run, run.config(), COMPARE, run.plan().num_processes), say)
    await ingest_run(run, say)


async def show_history(run: RunDir) -> None:
    """What was decided so far, as an artifact."""
    found = await asyncio.to_thread(results.load_history, run.config().store, run.run_id)
    await acreate_markdown_artifact(
        markdown_history(found), key="dflop-history", description=f"what run {run.run_id} noticed and decided"
    )


@task(name="summary", **_STEP)
async def summarise(run: RunDir) -> None:
    """Last ingest, report.html and the summary artifact."""
    await ingest_run(run, get_run_logger().info)
    found = await asyncio.to_thread(results.write_report, run)
    await acreate_markdown_artifact(markdown_summary(found), key="dflop-summary", description=found.verdict)
    await show_history(run)
