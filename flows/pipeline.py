"""The whole of a run: profile -> plan and train in turns -> compare -> report. `flows/pipeline.py:pipeline`.

Thin on purpose: what is done stands in `dflop/steps/parts.py`; `dflop train` does the same without Prefect. The flow
watches and records; it owns nothing. Jobs are journalled before anybody waits, profiles are looked up in the store
before anything is submitted, training resumes from its checkpoint: run it again after any crash and it goes on.
"""

from __future__ import annotations

from campaign import take_turns
from driving import conduct, driven, empty_the_queue, flow_run_name, step
from prefect import State, flow
from profiles import profile
from reports import report

from dflop.config import Config
from dflop.steps import parts


@flow(name="dflop-pipeline", flow_run_name=flow_run_name, on_cancellation=[empty_the_queue])
async def pipeline(
    config: Config | None = None, config_path: str = "", overrides: tuple[str, ...] = (), run: str = ""
) -> str | State[str]:
    """Run, or go on with, the whole pipeline of a configuration.

    Args:
        config: Configuration of a new run, or of the unfinished one that has the same.
        config_path: YAML file to read it from, where `config` is left empty.
        overrides: `a.b=value`, for the file.
        run: Run to go on with (directory, id, beginning of an id, `latest`), in place of both.

    Returns:
        The run directory.
    """
    return await conduct(_pipeline, config, config_path, overrides, run)


async def _pipeline() -> None:
    drive = driven().drive
    where = str(drive.run.path)
    await profile(run=where)
    await take_turns()
    if parts.wants_comparison(drive):
        await step("compare", parts.compare)
    drive.done()
    await report(run=where)
