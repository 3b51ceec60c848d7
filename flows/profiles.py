"""Profiles of a run, of its dataset and of its modules: `flows/profiles.py:profile`."""

from __future__ import annotations

import asyncio

from driving import conduct, driven, empty_the_queue, flow_run_name, step
from prefect import State, flow

from dflop.config import Config
from dflop.steps import parts, plan_page


@flow(name="dflop-profile", flow_run_name=flow_run_name, on_cancellation=[empty_the_queue])
async def profile(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> str | State[str]:
    """Profile the dataset and the modules of a run, as far as the store does not know them.

    Args:
        config: Configuration of a new run, or of the unfinished one that has the same.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to go on with (directory, id, beginning of an id, `latest`), in place of both.

    Returns:
        The run directory.
    """
    return await conduct(_profile, config, config_path, overrides, run)


async def _profile() -> None:
    if driven().drive.config.dataset.demo:
        await step("demo-data", parts.demo_data)
    await step("data-profile", parts.data_profile, _show_data)
    await step("model-profile", parts.model_profile)


async def _show_data(_: None) -> None:
    found = driven()
    rows = await asyncio.to_thread(plan_page.data_rows, found.drive.run)
    await found.page.table("data-profile", rows, "tokens per kind of sample and module")
