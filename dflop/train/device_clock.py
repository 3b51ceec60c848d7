"""Readings of a clock that stand where they were asked for among a device's work, and wait for none of it.

A CPU has done what it was given when the next line runs. A GPU's stream has not: there a mark is a CUDA event, queued
behind the work before it, and all events of a step are read at its end, with one wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Reading(NamedTuple):
    """Since the start of the clock."""

    wall_s: float
    compute_s: float
    """Of this thread, where processes share cores; on a GPU as `wall_s`."""


Mark = Reading | torch.cuda.Event


class DeviceClock:
    """Started by making it, once the device has done all that this thread gave it before.

    Args:
        device: Whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        if self._is_cuda:
            torch.cuda.current_stream(device).synchronize()
        self.started_at_s = time.perf_counter()
        """On the clock of `time.perf_counter`."""
        self._first = self.mark()

    def mark(self) -> Mark:
        """What `read` turns into a reading."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        return Reading(time.perf_counter() - self.started_at_s, time.thread_time())

    def read(self, marks: Iterable[Mark]) -> list[Reading]:
        """Readings of marks, in their order; waits until the device has come to the last of them."""
        found = []
        for mark in marks:
            if not isinstance(mark, Reading):
                assert not isinstance(self._first, Reading)
                mark.synchronize()
                since_s = self._first.elapsed_time(mark) / 1e3
                mark = Reading(since_s, since_s)
            found.append(mark)
        return found
