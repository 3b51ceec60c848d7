"""The steps of a run as Prefect tasks: typed values in, typed values out. What they do stands in `dflop/steps/`."""

from __future__ import annotations

import asyncio
from typing import Any

from page import Page
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import Task

from dflop import __version__
from dflop.records import Plan, ProfileRecord
from dflop.report.summary import RunSummary
from dflop.run.directory import RunDir
from dflop.run.queue import launcher_of
from dflop.steps import next_plan, profiling, reporting, training
from dflop.steps.follow import ingest_run, is_infrastructure_failure
from dflop.steps.profiling import DataKey
from dflop.steps.session import RETRIES, RETRY_DELAY_S
from dflop.steps.training import Trained
from dflop.store.ingest import freshen
from dflop.views import run_results


def store_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Prefect cache key: version, task, and the profile's key in the store (code, hardware and data)."""
    return f"dflop-{__version__}-{context.task.name}-{parameters['key']}"


async def should_retry(_task: Task[Any, Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether Prefect runs a task again: after failures of the cluster, never after failures of the job itself."""
    context = TaskRunContext.get()
    assert context is not None
    return is_infrastructure_failure(await state.aresult(raise_on_failure=False), context.parameters["run"])


RETRIED: dict[str, Any] = {
    "retries": RETRIES,
    "retry_delay_seconds": RETRY_DELAY_S,
    "retry_condition_fn": should_retry,
}


@task(name="profile-data", cache_key_fn=store_key, persist_result=True, **RETRIED)
async def profile_data(run: RunDir, key: DataKey) -> ProfileRecord:
    """Sizes of every sample, measured by jobs over shards of the dataset; in the store and in Prefect under the key."""
    async with Page("profile-data", run) as page:
        return await profiling.profile_data(run, launcher_of(run, run.config()), page, key)


@task(name="profile-model", cache_key_fn=store_key, persist_result=True, **RETRIED)
async def profile_model(run: RunDir, data: ProfileRecord, key: str) -> ProfileRecord:
    """Times of every module and of messages on the cluster's devices, by an array of jobs per tensor-parallel degree.

    The samples say what modules are used and how large their inputs are.
    """
    async with Page("profile-model", run) as page:
        return await profiling.profile_model(run, launcher_of(run, run.config()), page, data)


@task(name="optimize-plan", cache_policy=NO_CACHE)
async def optimize_plan(run: RunDir, model: ProfileRecord | None, trained: Trained) -> Plan:
    """The layout for what is trained next: of a stage, or in place of the plan whose job stopped for another.

    Without a `model` profile, costs are as the store has them.
    """
    async with Page("optimize-plan", run) as page:
        launcher = launcher_of(run, run.config())
        plans = await asyncio.to_thread(next_plan.next_plan, run, launcher, trained.advice, page.say, model)
        # Cost tables are fitted when the first plan is made.
        await page.table("model-profile", reporting.cost_rows, run, description="what the modules cost")
        await page.markdown("plan", reporting.plan_page, run, plans, description=plans[0].reason)
        return plans[0]


@task(name="train", cache_policy=NO_CACHE, **RETRIED)
async def train(run: RunDir, plan: Plan | None) -> Trained:
    """The training job: to the end of its stage, until another plan pays, or until its time is over.

    Without a `plan`, it trains under that of the run directory.
    """
    async with Page("train", run) as page:
        if plan is not None:
            page.say(f"under plan {plan.plan_id}")
        return await training.train(run, launcher_of(run, run.config()), page)


@task(name="compare", cache_policy=NO_CACHE, **RETRIED)
async def compare(run: RunDir, trained: Trained) -> None:
    """The first batches under the plan, balanced and in arrival order, once the run has trained to its end."""
    async with Page("compare", run) as page:
        page.say(f"after {trained.next_step} steps of training")
        await training.compare(run, launcher_of(run, run.config()), page)


@task(name="report", cache_policy=NO_CACHE)
async def report(run: RunDir, trained: Trained | None) -> RunSummary:
    """report.html from what the store knows, with summary and history on the page of the flow run.

    `trained` is None where another process may be driving the run.
    """
    async with Page("report", run) as page:
        if trained is None:
            await asyncio.to_thread(freshen, run.config().store, run.run_id, page.say)
        else:
            await ingest_run(run, page.say)
        summary = await asyncio.to_thread(run_results.write_report, run)
        await page.markdown("summary", reporting.summary_page, run, summary, description=summary.verdict)
        return summary
