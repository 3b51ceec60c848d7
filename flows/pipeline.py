"""Prefect flows launch jobs for data and model profiles, optimize a plan, and submit the training job.

Profiles are kept in the store, jobs are journalled before anybody waits, training resumes from its checkpoint: run a
flow again after any crash and it goes on. `dflop train` is the same without Prefect (`dflop/steps/session.py`). Steps
of the pipeline are flows of their own, too, with the same parameters.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import tasks
from flow_run import Texts, drive, empty_the_queue, note_crash, plain_logs
from page import Outbox, Page
from prefect import flow, get_run_logger

from dflop.config import TypedConfig, load_config
from dflop.records import Plan, ProfileRecord
from dflop.report.summary import RunSummary
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.find import find_run, runs_folder
from dflop.run.queue import launcher_of
from dflop.steps import planning, profiling, reporting, training
from dflop.steps.training import Trained


@flow(name="dflop-pipeline", on_cancellation=[empty_the_queue], on_crashed=[note_crash])
async def pipeline(config: TypedConfig = None, config_path: str = "", overrides: Texts = (), run: str = "") -> Any:
    """Run or resume the whole pipeline of a configuration.

    Args:
        config: Configuration of a new run, or of the unfinished run with the same one.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to resume (directory, id, beginning of an id, `latest`), in place of both.
    """
    return await drive(_all_steps, config, config_path, overrides, run)


@flow(name="dflop-profile", on_cancellation=[empty_the_queue], on_crashed=[note_crash])
async def profile(config: TypedConfig = None, config_path: str = "", overrides: Texts = (), run: str = "") -> Any:
    """Profile dataset and modules that the store has no profiles of; parameters as of dflop-pipeline."""
    return await drive(profiled, config, config_path, overrides, run)


@flow(name="dflop-plan", on_cancellation=[empty_the_queue], on_crashed=[note_crash])
async def plan(config: TypedConfig = None, config_path: str = "", overrides: Texts = (), run: str = "") -> Any:
    """Choose the layout for what a profiled run trains next; parameters as of dflop-pipeline."""
    return await drive(_next_plan, config, config_path, overrides, run)


@flow(name="dflop-train", on_cancellation=[empty_the_queue], on_crashed=[note_crash])
async def train(config: TypedConfig = None, config_path: str = "", overrides: Texts = (), run: str = "") -> Any:
    """Train a planned run to the end of its stage, or until another plan pays; parameters as of dflop-pipeline."""
    return await drive(_training, config, config_path, overrides, run)


@flow(name="dflop-report", flow_run_name="{run}", on_crashed=[note_crash])
async def report(run: str = "latest", config_path: str = "") -> RunSummary:
    """Write report.html of a run from what the store knows now, and show summary and history.

    Args:
        run: Run directory, id, beginning of an id, or `latest`; another process may be driving it.
        config_path: YAML file whose `runs:` says where runs are; empty: DFLOP_RUNS, or `runs`.
    """
    plain_logs()
    folder = load_config(Path(config_path)).runs if config_path else runs_folder()
    async with Outbox(get_run_logger().info):
        return await tasks.report(await asyncio.to_thread(find_run, run, folder), None)


async def _all_steps(run: RunDir) -> RunSummary:
    model = await profiled(run)
    trained = await trained_by_now(run)
    while not trained.is_over:
        plan = await tasks.optimize_plan(run, model, trained)
        trained = await tasks.train(run, plan)
    if training.wants_comparison(run):
        await tasks.compare(run, trained)
    lifecycle.note(run, lifecycle.DONE)
    return await tasks.report(run, trained)


async def _next_plan(run: RunDir) -> Plan:
    return await tasks.optimize_plan(run, None, await trained_by_now(run))


async def _training(run: RunDir) -> Trained:
    trained = await tasks.train(run, None)
    if trained.is_over and not training.wants_comparison(run):
        lifecycle.note(run, lifecycle.DONE)
    return trained


async def profiled(run: RunDir) -> ProfileRecord:
    """The profile of a run's modules; Prefect's cache is asked where the store has all that the run needs."""
    data = await profiled_data(run)
    key, *_ = await asyncio.to_thread(planning.model_profile_key, run.config())
    is_stored = await asyncio.to_thread(profiling.is_profiled, run)
    return await tasks.profile_model.with_options(refresh_cache=not is_stored)(run, data, key)


async def profiled_data(run: RunDir) -> ProfileRecord:
    """The profile of a run's samples, which then lie in its directory; Prefect's cache is asked if the store has it."""
    say, store = get_run_logger().info, run.config().store
    key = await asyncio.to_thread(profiling.data_profile_key, run, say)
    is_stored = await asyncio.to_thread(profiling.stored_profile, store, key.key) is not None
    data = await tasks.profile_data.with_options(refresh_cache=not is_stored)(run, key)
    await asyncio.to_thread(profiling.take_samples, run, data, say)
    what = "tokens per kind of sample and module"
    await Page("profile-data", run).table("data-profile", reporting.data_rows, run, description=what)
    return data


async def trained_by_now(run: RunDir) -> Trained:
    """How far a run has trained before this flow does anything."""
    return await asyncio.to_thread(training.trained_so_far, run, launcher_of(run, run.config()))
