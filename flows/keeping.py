"""Jobs outlive a flow that ends without anybody having asked for it.

A flow is cancelled by people (Ctrl-C, the UI, a worker that is stopped), and then its queue has to be empty. Prefect
also cancels flows by itself: one whose concurrency lease is gone, as after a restart of a server that keeps leases in
memory. Both arrive as the same CancelledError; but people's arrive by a signal. Only those cancel jobs. Others leave
them running, and the next run adopts them.

A worker that is killed asks for nothing either: its flows go on, although nobody reads what they print.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, cast

from rich.console import Console

from dflop.launch import JobHandle, Launcher

STOPS = {signal.SIGINT, signal.SIGTERM}


@contextlib.contextmanager
def signals_seen() -> Iterator[Callable[[], bool]]:
    """Whether this process got a signal to stop within the block, whoever handles it.

    Yields True for ever where that cannot be known: outside the main thread, or where somebody else listens already.
    """
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    seen: set[int] = set()

    def was_told() -> bool:
        with contextlib.suppress(BlockingIOError):
            seen.update(os.read(reading, 4096))
        return bool(seen & STOPS)

    before: int | None = None
    try:
        try:
            # Python writes the number of every signal to it that has a handler, before the handler runs.
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        except ValueError:
            yield lambda: True
            return
        if before != -1:
            signal.set_wakeup_fd(before)
            yield lambda: True
            return
        yield was_told
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)


def outlive_readers() -> None:
    """From now on lines that nobody reads any more are lost; rich, which prints Prefect's, would end the process."""
    Console.on_broken_pipe = lambda self: None  # type: ignore[method-assign]  # it has no other switch


class KeepsJobs:
    """A launcher that leaves jobs alone when its flow is torn down and nobody asked for it.

    Args:
        launcher: Does all the work.
        was_told: Whether somebody asked for the end of the flow.
        say: Told what is left running.
    """

    def __init__(self, launcher: Launcher, was_told: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._launcher, self._was_told, self._say = launcher, was_told, say
        self._kept: set[JobHandle] = set()
        self._flow = asyncio.current_task()

    @staticmethod
    def around(launcher: Launcher, was_told: Callable[[], bool], say: Callable[[str], None]) -> Launcher:
        """The same launcher in all but cancelling; call it in the task of the flow."""
        return cast(Launcher, KeepsJobs(launcher, was_told, say))

    def cancel(self, *handles: JobHandle) -> None:
        """End the jobs, unless the flow is going down by itself."""
        if self._flow is not None and self._flow.cancelling() and not self._was_told():
            for handle in {*handles} - self._kept:
                self._say(f"the flow ends and nobody asked for it: {handle} goes on, the next run adopts it")
            self._kept.update(handles)
            return
        self._launcher.cancel(*handles)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)
