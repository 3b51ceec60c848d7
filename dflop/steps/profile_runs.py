"""Profiles as runs of their own, which train nothing: `dflop data profile`, `dflop cost profile`, and before a plan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dflop.config import Config
from dflop.data.dataset_profile import profile_key
from dflop.errors import StoreError
from dflop.launch import Launcher
from dflop.records import ProfileRecord
from dflop.run import lifecycle
from dflop.run.directory import RunDir, dataset_ref, family_of
from dflop.run.launcher import launcher_of
from dflop.run.messages import Say
from dflop.steps import planning, profiling
from dflop.steps.follow import Listener
from dflop.steps.session import driver_session, profiled, profiled_data
from dflop.store.reader import Reader


@contextlib.asynccontextmanager
async def own_run(config: Config, suffix: str, say: Say) -> AsyncIterator[RunDir]:
    """A run directory for work that trains nothing, named after it, with its state in the store."""
    run, _ = lifecycle.begin(config.model_copy(update={"name": f"{config.name}-{suffix}"}), say, trains=False)
    async with driver_session(run, say):
        yield run


async def profile_dataset(config: Config, say: Say) -> ProfileRecord:
    """Profiles a dataset.

    Raises:
        DataError: the dataset cannot be read, or too much of it is unusable.
        LaunchError: a job cannot be submitted.
    """
    async with own_run(config, "data", say) as run:
        return await data_profile(run, launcher_of(run, run.config()), say)


async def data_profile(run: RunDir, launcher: Launcher, say: Say) -> ProfileRecord:
    """The profile of a run that trains nothing, judged; raises as `profile_dataset`."""
    found = await profiled_data(run, launcher, Listener(say))
    await asyncio.to_thread(profiling.judge, run, found, say)
    return found


async def profile_modules(config: Config, say: Say) -> str:
    """Key of the profile of a model's modules over its dataset, with cost tables; raises as `profile_dataset`."""
    async with own_run(config, "model", say) as run:
        model = await profiled(run, Listener(say))
        specs = profiling.specs_of(run)
        await asyncio.to_thread(planning.cost_tables, run.run_id, run.config(), model.profile_key, specs, say)
        return model.profile_key


def forecast_dataset(config: Config, say: Say) -> str:
    """Key of the profile that `profile_dataset` would find or make; empty where the demo dataset is still to be built.

    Nothing is written.

    Raises:
        ConfigError: unknown family, or a tokenizer that lacks its tokens.
        DataError: the dataset cannot be read.
    """
    if config.dataset.demo and not config.dataset.annotations.is_file():
        say("the demo dataset would be built first; the profile's key depends on it")
        return ""
    key = profile_key(dataset_ref(config), family_of(config))
    found = None
    with contextlib.suppress(StoreError), Reader(config.store) as reader:
        found = reader.profile(key)
    if found is not None:
        say(f"in the store: {found.num_rows} samples, {found.num_quarantined} skipped; nothing would run")
    else:
        say(f"not in the store: up to {config.data_profile.num_shards} jobs would run, {config.cluster.backend}")
    return key
