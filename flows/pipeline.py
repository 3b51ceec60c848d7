"""Prefect flows launch jobs for data and model profiles, optimize a plan, and submit the training job.

Profiles are kept in the store, jobs are journalled before anybody waits, training resumes from its checkpoint: run a
flow again after any crash and it goes on. `dflop train` is the same without Prefect (`dflop/steps/session.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from flow_run import begin, cancelled, drives, driving, finished
from page import Page
from prefect import State, get_run_logger
from tasks import compare, optimize_plan, profile_data, profile_model, report, train

from dflop.config import Config
from dflop.records import ProfileRecord
from dflop.report.summary import RunSummary
from dflop.run.directory import RunDir
from dflop.run.launcher import launcher_of
from dflop.run.lifecycle import is_finished
from dflop.steps import planning, profiling, reporting, training
from dflop.steps.session import finish


@drives("dflop-pipeline")
async def pipeline(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> RunSummary | State[Any]:
    """Run, or go on with, the whole pipeline of a configuration.

    Args:
        config: Configuration of a new run, or of the unfinished one that has the same.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to go on with (directory, id, beginning of an id, `latest`), in place of both.

    Returns:
        Summary of the run.
    """
    found = await begin(config, config_path, overrides, run)
    if is_finished(found):
        return finished(found)
    async with driving(found):
        data = await profiled_data(found)
        model = await profiled_model(found, data)
        trained = await trained_by_now(found)
        while not trained.is_over:
            plan = await optimize_plan(found, model, trained)
            trained = await train(found, plan)
        if training.wants_comparison(found):
            await compare(found, trained)
        finish(found)
        return await report(found, trained)
    return cancelled(found)


async def profiled_data(run: RunDir) -> ProfileRecord:
    """The profile of a run's samples, which then lie in its directory; Prefect's cache is asked if the store has it."""
    say, store = get_run_logger().info, run.config().store
    key = await asyncio.to_thread(profiling.data_profile_key, run, say)
    is_stored = await asyncio.to_thread(profiling.stored_profile, store, key) is not None
    data = await profile_data.with_options(refresh_cache=not is_stored)(run, key)
    await asyncio.to_thread(profiling.take_samples, run, data, say)
    what = "tokens per kind of sample and module"
    await Page("profile-data", run).table("data-profile", reporting.data_rows, run, description=what)
    return data


async def profiled_model(run: RunDir, data: ProfileRecord) -> ProfileRecord:
    """The profile of a run's modules; Prefect's cache is asked if the store has all that the run needs."""
    key, *_ = await asyncio.to_thread(planning.model_profile_key, run.config())
    is_stored = await asyncio.to_thread(profiling.is_profiled, run)
    return await profile_model.with_options(refresh_cache=not is_stored)(run, data, key)


async def trained_by_now(run: RunDir) -> training.Trained:
    """How far a run has trained before this flow does anything."""
    return await asyncio.to_thread(training.trained_so_far, run, launcher_of(run, run.config()))
