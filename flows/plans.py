"""The plan for what a run trains next: `flows/plans.py:plan`."""

from __future__ import annotations

import asyncio

from driving import conduct, driven, empty_the_queue, flow_run_name, step
from prefect import State, flow

from dflop.config import Config
from dflop.records import Plan
from dflop.steps import parts, plan_page


@flow(name="dflop-plan", flow_run_name=flow_run_name, on_cancellation=[empty_the_queue])
async def plan(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> str | State[str]:
    """Choose layout and number of microbatches for what a run trains next; it must be profiled.

    Args:
        config: Configuration of a new run, or of the unfinished one that has the same.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to go on with (directory, id, beginning of an id, `latest`), in place of both.

    Returns:
        The run directory.
    """
    return await conduct(_plan, config, config_path, overrides, run)


async def _plan() -> None:
    await step("plan", parts.plan, _show)


async def _show(plans: tuple[Plan, ...]) -> None:
    found = driven()
    run, page = found.drive.run, found.page
    # Cost tables are fitted when the first plan is made.
    await page.table("model-profile", await asyncio.to_thread(plan_page.cost_rows, run), "what the modules cost")
    if plans:
        text = await asyncio.to_thread(plan_page.plan_page, run, plans)
        await page.markdown("plan", text, plans[0].reason, keeps_old=True)
