"""SIGTERM ends a driver as Ctrl-C does: its jobs are cancelled, and how the run stands is noted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Cancel the task that this is called in on SIGTERM; the process then ends with 128 + 15.

    asyncio does so with SIGINT by itself, after which KeyboardInterrupt is raised.

    Raises:
        SystemExit: there was a SIGTERM.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    was_told = False

    def stop() -> None:
        nonlocal was_told
        was_told = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if was_told:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
