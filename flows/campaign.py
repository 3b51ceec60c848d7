"""Planning and training in turns, for every stage and whenever another plan pays: `flows/campaign.py:campaign`."""

from __future__ import annotations

from driving import conduct, driven, empty_the_queue, flow_run_name
from plans import plan
from prefect import State, flow
from training import train

from dflop.config import Config
from dflop.steps import parts
from dflop.steps.continuing import Todo


@flow(name="dflop-campaign", flow_run_name=flow_run_name, on_cancellation=[empty_the_queue])
async def campaign(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> str | State[str]:
    """Plan and train in turns, to the end of training; the run must be profiled.

    Args:
        config: Configuration of a new run, or of the unfinished one that has the same.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to go on with (directory, id, beginning of an id, `latest`), in place of both.

    Returns:
        The run directory.
    """
    return await conduct(take_turns, config, config_path, overrides, run)


async def take_turns() -> None:
    """Plan, train, plan anew where that pays, and so on (`dflop/steps/continuing.py`)."""
    drive = driven().drive
    where = str(drive.run.path)
    while (todo := await parts.what_next(drive)) is not Todo.NOTHING:
        await (plan if todo is Todo.PLAN else train)(run=where)
    await parts.finish(drive)
