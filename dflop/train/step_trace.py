"""What one step of one rank took: microbatch by microbatch, and in traced steps everything between them, too.

The engine marks when an action of its schedule began and ended, and within it when its compute did: what comes before
is the wait for messages and what comes after is handing them over.

Marks stand where they were asked for among a device's work, and wait for none of it. A CPU has done what it was given
when the next line runs. A GPU's stream has not: there a mark is a CUDA event, queued behind the work before it, and all
events of a step are read at its end, with one wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dflop.records import StepObservation
from dflop.simulate.order import Action

Floats = npt.NDArray[np.float64]
WHOLE_STEP = -1
"""Microbatch of what belongs to none."""


class Reading(NamedTuple):
    """Since the start of the clock."""

    wall_s: float
    compute_s: float
    """Processor seconds of this thread, where processes share cores; on a GPU as `wall_s`."""


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


class Span(NamedTuple):
    """One thing a rank did; see `dflop.records.RankSpan`."""

    name: str
    microbatch: int
    start_s: float
    duration_s: float
    num_bytes: int = 0


class Visit(NamedTuple):
    """One action of the schedule, with the messages before and behind it. Seconds from the start of the engine."""

    is_forward: bool
    microbatch: int
    start_s: float
    busy_from_s: float
    busy_until_s: float
    end_s: float
    compute_s: float
    received_bytes: int
    sent_bytes: int

    @property
    def busy_s(self) -> float:
        return self.busy_until_s - self.busy_from_s


def visit(action: Action, readings: Sequence[Reading], received_bytes: int, sent_bytes: int) -> Visit:
    """An action from the readings at its start, around its compute and at its end."""
    began, busy, done, ended = readings
    times = began.wall_s, busy.wall_s, done.wall_s, ended.wall_s
    compute_s = done.compute_s - busy.compute_s
    return Visit(action.phase == "F", action.microbatch, *times, compute_s, received_bytes, sent_bytes)


def sums_of_samples(of_tokens: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Floats:
    """Sums per sample of (position of each token's sample, its cross entropy), in float64; reads the device once."""
    if not of_tokens:
        return np.zeros(0)
    samples, losses = (torch.cat(each).cpu().numpy() for each in zip(*of_tokens, strict=True))
    return np.bincount(samples, losses).astype(np.float64)  # integers where there is no token


@dataclass(slots=True)
class StepTrace:
    """What `Engine.run` measured."""

    losses: dict[int, float]
    """Per microbatch, its share of the global mean loss; none off the last LLM stage."""
    started_at_s: float = 0.0
    """When the engine began, on the clock of `time.perf_counter`."""
    elapsed_s: float = 0.0
    """From there to its end."""
    visits: list[Visit] = field(default_factory=list)
    """In the order in which they were made."""
    sample_losses: Floats = field(default_factory=lambda: np.zeros(0))
    """Summed cross entropies of the tokens that this rank has of each sample, by position in the global batch, up to
    the last one with any."""

    @property
    def loss(self) -> float:
        """This rank's share of the global mean loss."""
        return sum(self.losses.values())

    @property
    def busy_s(self) -> float:
        return sum(each.busy_s for each in self.visits)

    @property
    def timings(self) -> dict[int, dict[str, Any]]:
        """Per microbatch that this rank had work in, what a `MicrobatchSpan` says was measured."""
        found: dict[int, dict[str, Any]] = {}
        for each in self.visits:
            phase = "forward" if each.is_forward else "backward"
            found.setdefault(each.microbatch, {}).update(
                {
                    f"{phase}_start_s": each.busy_from_s,
                    f"{phase}_s": each.busy_s,
                    f"{phase}_compute_s": each.compute_s,
                }
            )
        return found

    def spans(self, step_started_at_s: float) -> Iterator[Span]:
        """Everything between the messages and the compute of the step, in order.

        Args:
            step_started_at_s: What the spans' starts count from, on the clock of `started_at_s`.
        """
        offset_s = self.started_at_s - step_started_at_s
        end_s = 0.0
        for each in self.visits:
            k, end_s = each.microbatch, each.end_s
            yield Span("receive_wait", k, offset_s + each.start_s, each.busy_from_s - each.start_s, each.received_bytes)
            yield Span("forward" if each.is_forward else "backward", k, offset_s + each.busy_from_s, each.busy_s)
            yield Span("send", k, offset_s + each.busy_until_s, end_s - each.busy_until_s, each.sent_bytes)
        yield Span("send", WHOLE_STEP, offset_s + end_s, self.elapsed_s - end_s)


def step_spans(trace: StepTrace, seen: StepObservation, started_at_s: float, asked_at_s: float) -> list[Span]:
    """Spans of one step, those of its own in order.

    Args:
        trace: The engine's part.
        seen: The rest. A device may still be at the update: what is left of it is in the next step.
        started_at_s: When the step began, on the clock of `time.perf_counter`.
        asked_at_s: When another thread began to wait for its plan, on the same clock.
    """
    updated_s = seen.step_s - seen.optimizer_s
    return [
        Span("schedule_wait", WHOLE_STEP, asked_at_s - started_at_s, seen.schedule_wait_s),
        Span("data_wait", WHOLE_STEP, -seen.data_wait_s, seen.data_wait_s),
        *trace.spans(started_at_s),
        Span("reduce", WHOLE_STEP, updated_s - seen.reduce_s, seen.reduce_s),
        Span("optimizer", WHOLE_STEP, updated_s, seen.optimizer_s),
    ]
