"""The training of a run under its plan: `flows/training.py:train`."""

from __future__ import annotations

from driving import conduct, driven, empty_the_queue, flow_run_name, step
from prefect import State, flow

from dflop.config import Config
from dflop.steps import parts


@flow(name="dflop-train", flow_run_name=flow_run_name, on_cancellation=[empty_the_queue])
async def train(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> str | State[str]:
    """Train under the plan of a run, to the end of the stage or until another plan pays.

    Args:
        config: Configuration of a new run, or of the unfinished one that has the same.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to go on with (directory, id, beginning of an id, `latest`), in place of both.

    Returns:
        The run directory.
    """
    return await conduct(_train, config, config_path, overrides, run)


async def _train() -> None:
    await step("train", parts.train)
    await parts.finish(driven().drive)
