"""The steps of a run as flows of their own, over the tasks of the pipeline; parameters are those of the pipeline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import tasks
from flow_run import begin, cancelled, drives, driving, finished, looks, plain_logs
from pipeline import profiled_data, profiled_model, trained_by_now
from prefect import State

from dflop.config import Config, load_config
from dflop.records import Plan, ProfileRecord
from dflop.report.summary import RunSummary
from dflop.run.find import find_run, runs_folder
from dflop.run.lifecycle import is_finished
from dflop.steps import training
from dflop.steps.session import finish
from dflop.steps.training import Trained


@drives("dflop-profile")
async def profile(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> ProfileRecord | State[Any]:
    """Profile dataset and modules, as far as the store does not know them."""
    found = await begin(config, config_path, overrides, run)
    if is_finished(found):
        return finished(found)
    async with driving(found):
        return await profiled_model(found, await profiled_data(found))
    return cancelled(found)


@drives("dflop-plan")
async def plan(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> Plan | State[Any]:
    """Choose the layout for what a profiled run trains next."""
    found = await begin(config, config_path, overrides, run)
    if is_finished(found):
        return finished(found)
    async with driving(found):
        return await tasks.optimize_plan(found, None, await trained_by_now(found))
    return cancelled(found)


@drives("dflop-train")
async def train(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> Trained | State[Any]:
    """Train a planned run to the end of its stage, or until another plan pays."""
    found = await begin(config, config_path, overrides, run)
    if is_finished(found):
        return finished(found)
    async with driving(found):
        trained = await tasks.train(found, None)
        if trained.is_over and not training.wants_comparison(found):
            finish(found)
        return trained
    return cancelled(found)


@looks("dflop-report")
async def report(run: str = "latest", config_path: str = "") -> RunSummary:
    """Write report.html of a run from what the store knows now, and show summary and history.

    Args:
        run: Run directory, id, beginning of an id, or `latest`; somebody else may be driving it.
        config_path: YAML file whose `runs:` says where runs are; empty: DFLOP_RUNS, or `runs`.
    """
    plain_logs()
    folder = load_config(Path(config_path)).runs if config_path else runs_folder()
    found = await asyncio.to_thread(find_run, run, folder)
    return await tasks.report(found, None)
