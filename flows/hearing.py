"""Cancel is heard by the flow that drives a run, too, and not only by who started the flow.

`dflop serve` and workers listen for Cancel on behalf of their flows, but Prefect's listener gives up for good once the
server was away for half a minute. And nobody listens for a flow of `dflop run`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

from prefect.client.orchestration import get_client

from dflop.errors import DflopError
from dflop.run.cancel import cancel_run
from dflop.run.console import Say
from dflop.run.directory import RunDir

EVERY_S = 10.0
TIMEOUT_S = 15.0


@contextlib.asynccontextmanager
async def hears_cancel(flow_run_id: UUID | None, run: RunDir, say: Say) -> AsyncIterator[None]:
    """Within the block, a flow run that is cancelled has the queue of its run emptied, as `dflop cancel` does.

    Its driver then sees its job cancelled, and ends.

    Args:
        flow_run_id: Asked for; None: nobody is asked.
        run: What it drives.
        say: Told what is cancelled.
    """
    if flow_run_id is None:
        yield
        return
    listening = asyncio.create_task(_listen(flow_run_id, run, say), name="hears-cancel")
    try:
        yield
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _listen(flow_run_id: UUID, run: RunDir, say: Say) -> None:
    while not await _is_cancelled(flow_run_id):
        await asyncio.sleep(EVERY_S)
    say("the flow run is cancelled")
    try:
        await asyncio.to_thread(cancel_run, run, say)
    except DflopError as error:
        say(str(error))


async def _is_cancelled(flow_run_id: UUID) -> bool:
    """False also where nobody answers."""
    with contextlib.suppress(Exception):  # whatever a client, a proxy or a server comes up with: it is asked again
        # A client of its own: the flow's would try for minutes to reach a server that is gone.
        async with asyncio.timeout(TIMEOUT_S), get_client(httpx_settings={"timeout": TIMEOUT_S}) as client:
            state = (await client.read_flow_run(flow_run_id)).state
            return state is not None and (state.is_cancelling() or state.is_cancelled())
    return False
