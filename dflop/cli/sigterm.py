"""Drivers, which follow jobs: SIGTERM ends them as Ctrl-C does, so that no job is left behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_driver(driver: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that follows jobs; on SIGTERM it is cancelled, which cancels its jobs.

    asyncio does so with SIGINT by itself, after which KeyboardInterrupt is raised.

    Raises:
        SystemExit: there was a SIGTERM; the process ends with 128 + 15.
    """
    was_told = False

    async def listening() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def stop() -> None:
            nonlocal was_told
            was_told = True
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, stop)
        try:
            return await driver
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    try:
        return asyncio.run(listening())
    except asyncio.CancelledError:
        if was_told:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
