"""Steps of a run as a Chrome trace, which Perfetto and chrome://tracing show: predicted and measured, rank by rank.

A rank is a process of the trace with a track of what it measured, one of what was predicted (the simulator run again,
see `predicted.py`) and, where the step was traced, one of the thread that prepares its input. Arrows lead from what a
rank measured to what waited for it elsewhere. Microbatches and steps count from 0, as in the store; times are
microseconds since the first thing shown, by the ranks' own clocks.

Inside a track everything is kept in whole nanoseconds: slices that touch in the store must not overlap in the trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflop import __version__
from dflop.records import Plan, RankSpan, StepObservation, StepPlan
from dflop.report.observed_steps import MeasuredStep
from dflop.report.predicted import Op, PredictedStep, simulate_again
from dflop.report.tables import layout_text, stage_name

MEASURED, INPUT, PREDICTED = 1, 2, 3
"""Tracks of a rank; steps whose predictions overlap, since they ran faster, need further ones behind the last."""
BEFORE_STEP, AFTER_STEP, OTHER_THREAD = "data_wait", "checkpoint", "schedule_wait"
"""Spans that are not inside their step."""
ARROW_NS = 10
"""How far inside a slice an arrow ends: at its very edge it might belong to the neighbour."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step and what is known of it."""

    measured: MeasuredStep
    plan: Plan | None = None
    """Layout it ran under; without it nothing is predicted, and stages have their modules' names."""
    step_plan: StepPlan | None = None
    spans: tuple[RankSpan, ...] = ()
    """Spans of the same attempt; empty where the step was not traced in full."""


def chrome_trace(run_id: str, steps: Sequence[TracedStep], max_concurrency: int | None = None) -> dict[str, Any]:
    """The trace as what JSON is made of.

    Args:
        run_id: For the trace's own description.
        steps: In order.
        max_concurrency: Processes that can compute at once; None: each has its device.
    """
    # What comes before the first step must not come before zero.
    ranks = [rank for step in steps[:1] for rank in step.measured.ranks]
    before = [*(rank.data_wait_s for rank in ranks), *(-span.start_s for step in steps[:1] for span in step.spans)]
    origin_s = min((_begin_s(rank) for rank in ranks), default=0.0) - max(0.0, *before, 0.0)
    measured_ends, predicted_ends, events = dict[int, int](), list[int](), list[Event]()
    for step in steps:
        again = None
        if step.plan is not None and step.step_plan is not None:
            again = simulate_again(step.plan, step.step_plan, step.measured.ranks, max_concurrency)
        events += _step(step, again, origin_s, measured_ends, predicted_ends)
    events = [*_names(steps, len(predicted_ends)), *events]
    for number, event in enumerate(e for e in events if e["ph"] in "sf"):
        event["id"] = number // 2
    numbers = [s.measured.step for s in steps]
    about = {
        "run": run_id,
        "steps": f"{numbers[0]} to {numbers[-1]}" if numbers else "none",
        "dflop": __version__,
        "measured": "measured by each rank with its own clock",
        "predicted": "simulated from the recorded predictions of every microbatch; messages take no time",
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(steps: Sequence[TracedStep], num_predicted: int) -> Iterator[Event]:
    """Names and order of processes and tracks; after another plan a rank may have had several places."""
    places: dict[int, dict[str, None]] = {}
    for step in steps:
        for rank in step.measured.ranks:
            stage = f"{rank.module} pp{rank.stage}"
            if step.plan is not None:
                stage = stage_name(step.plan, rank.module, rank.stage)
            places.setdefault(rank.rank, {})[f"{stage} dp{rank.dp_rank}"] = None
    tracks = {MEASURED: "measured"}
    tracks |= {PREDICTED + i: f"predicted (simulated){', overlapping' * (i > 0)}" for i in range(num_predicted)}
    if any(span.name == OTHER_THREAD and span.duration_s > 0 for step in steps for span in step.spans):
        tracks[INPUT] = "waits of the input thread (measured)"
    for pid, names in sorted(places.items()):
        yield _meta("process_name", pid, 0, name=f"rank {pid}: {', then '.join(names)}")
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for place, (track, name) in enumerate(tracks.items()):
            yield _meta("thread_name", pid, track, name=name)
            yield _meta("thread_sort_index", pid, track, sort_index=place)


def _meta(what: str, rank: int, track: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": _pid(rank), "tid": track, "ts": 0, "args": args}


def _step(
    step: TracedStep,
    again: PredictedStep | None,
    origin_s: float,
    measured_ends: dict[int, int],
    predicted_ends: list[int],
) -> Iterator[Event]:
    """Events of one step, which moves the ends of what each rank measured, and of the predicted tracks, on."""
    begins, spans = list[int](), defaultdict[int, list[RankSpan]](list)
    for span in step.spans:
        spans[span.rank].append(span)
    slices: dict[Op, tuple[int, int, int]] = {}
    for rank in step.measured.ranks:
        own = spans[rank.rank]
        # A clock that was set back would lay a step over the one before it.
        begin = max(_ns(_begin_s(rank) - origin_s), measured_ends.get(rank.rank, 0) + _ns(rank.data_wait_s))
        begins.append(begin)
        yield from _waits(rank, own, begin)
        yield from _measured(rank, own, begin, slices)
        behind = [begin + _ns(s.start_s + s.duration_s) for s in own if s.name == AFTER_STEP]
        measured_ends[rank.rank] = max([begin + _ns(rank.step_s), *behind])
    if again is not None and step.plan is not None:
        begin = min(begins)
        end = begin + _ns(again.pipeline_s) + _ns(step.plan.sync_s)
        free = next((i for i, at in enumerate(predicted_ends) if at <= begin), len(predicted_ends))
        predicted_ends[free : free + 1] = [end]
        for rank in step.measured.ranks:
            yield from _predicted(step.plan, again, rank, PREDICTED + free, begin)
        yield from _arrows(again, slices)


def _waits(rank: StepObservation, spans: Sequence[RankSpan], begin: int) -> Iterator[Event]:
    """What lies outside the step: waiting for its input before it, its checkpoint behind it."""
    args = {"step": rank.step}
    if rank.data_wait_s > 0:
        yield _slice(rank.rank, MEASURED, BEFORE_STEP, begin - _ns(rank.data_wait_s), begin, args)
    for span in spans:
        if span.duration_s > 0 and span.name in (AFTER_STEP, OTHER_THREAD):
            track = INPUT if span.name == OTHER_THREAD else MEASURED
            start, end = _from_to(begin, span.start_s, span.duration_s)
            yield _slice(rank.rank, track, span.name, max(0, start), end, args)


def _measured(
    rank: StepObservation, spans: Sequence[RankSpan], begin: int, slices: dict[Op, tuple[int, int, int]]
) -> Iterator[Event]:
    """The step and what is inside it; `slices` takes (rank, start, end) of what others may wait for."""
    end_of_step = begin + _ns(rank.step_s)
    of_step = {
        "step": rank.step, "attempt": rank.attempt, "policy": rank.policy, "step_s": rank.step_s,
        "busy_s": rank.busy_s, "predicted_step_s": rank.predicted_step_s,
        "loss": rank.loss if rank.num_supervised_tokens else math.nan,
    }  # fmt: skip
    yield _slice(rank.rank, MEASURED, f"step {rank.step}", begin, end_of_step, of_step)
    of_microbatch = {span.microbatch: span for span in rank.spans}
    at = begin
    for name, microbatch, start_s, duration_s, num_bytes in _inside(rank, spans):
        start, end = _from_to(begin, start_s, duration_s)
        start, end = max(start, at), min(max(end, at), end_of_step)
        if end <= start:
            continue
        args: dict[str, object] = {"step": rank.step}
        if microbatch >= 0:
            args["microbatch"] = microbatch
        if num_bytes:
            args["num_bytes"] = num_bytes
        seen = of_microbatch.get(microbatch)
        if seen is not None and name in ("forward", "backward"):
            is_forward = name == "forward"
            args |= {
                "predicted_s": seen.predicted_forward_s if is_forward else seen.predicted_backward_s,
                "compute_s": seen.forward_compute_s if is_forward else seen.backward_compute_s,
                "num_items": seen.num_items,
                "num_tokens": seen.num_tokens,
            }
            node = (rank.module, rank.stage, rank.dp_rank)
            slices.setdefault((node, microbatch, "F" if is_forward else "B"), (rank.rank, start, end))
        shown = f"{name} {microbatch}" if microbatch >= 0 else name
        yield _slice(rank.rank, MEASURED, shown, start, end, args)
        at = end


def _inside(rank: StepObservation, spans: Sequence[RankSpan]) -> list[tuple[str, int, float, float, int]]:
    """(name, microbatch, start, duration, bytes) of what is inside a step, in order: as traced, else as observed."""
    outside = (BEFORE_STEP, AFTER_STEP, OTHER_THREAD)
    found = [(s.name, s.microbatch, s.start_s, s.duration_s, s.num_bytes) for s in spans if s.name not in outside]
    if not found:
        for s in rank.spans:
            found.append(("forward", s.microbatch, s.forward_start_s, s.forward_s, 0))
            found.append(("backward", s.microbatch, s.backward_start_s, s.backward_s, 0))
        updated_s = rank.step_s - rank.optimizer_s
        found.append(("reduce", -1, updated_s - rank.reduce_s, rank.reduce_s, 0))
        found.append(("optimizer", -1, updated_s, rank.optimizer_s, 0))
    return sorted(found, key=lambda span: (span[2], span[2] + span[3]))


def _predicted(plan: Plan, again: PredictedStep, rank: StepObservation, track: int, begin: int) -> Iterator[Event]:
    """The same step as it was predicted, from when its first rank began."""
    end = begin + _ns(again.pipeline_s)
    end_of_step = end + _ns(plan.sync_s)
    of_step = {"step": rank.step, "pipeline_s": again.pipeline_s, "sync_s": plan.sync_s, "layout": layout_text(plan)}
    yield _slice(rank.rank, track, f"step {rank.step}", begin, end_of_step, of_step)
    for op in again.of((rank.module, rank.stage, rank.dp_rank)):
        start, stop = _from_to(begin, op.start_s, op.duration_s)
        if stop > start:
            name = "forward" if op.phase == "F" else "backward"
            args = {"step": rank.step, "microbatch": op.microbatch}
            yield _slice(rank.rank, track, f"{name} {op.microbatch}", start, stop, args)
    if end_of_step > end:
        yield _slice(rank.rank, track, "reduce + optimizer", end, end_of_step, {"step": rank.step})


def _arrows(again: PredictedStep, slices: Mapping[Op, tuple[int, int, int]]) -> Iterator[Event]:
    """From what was measured to what waited for it on another rank, in pairs."""
    for before, behind in again.waits:
        if before not in slices or behind not in slices:
            continue
        (from_rank, start, end), (to_rank, to_start, to_end) = slices[before], slices[behind]
        leaves = max(start, end - ARROW_NS)
        arrives = min(to_end, to_start + ARROW_NS)
        if arrives >= leaves:  # an arrow into the past: clocks of two nodes that disagree
            common = {"name": "rows" if before[2] == "F" else "gradients", "cat": "messages", "tid": MEASURED}
            yield {"ph": "s", "pid": _pid(from_rank), "ts": _us(leaves), **common}
            yield {"ph": "f", "bp": "e", "pid": _pid(to_rank), "ts": _us(arrives), **common}


def _slice(rank: int, track: int, name: str, start: int, end: int, args: Mapping[str, object]) -> Event:
    known = {key: value for key, value in args.items() if not (isinstance(value, float) and not math.isfinite(value))}
    kind = "predicted" if track >= PREDICTED else "measured"
    return {
        "ph": "X", "name": name, "cat": kind, "pid": _pid(rank), "tid": track, "ts": _us(start),
        "dur": _us(end - start), "args": known,
    }  # fmt: skip


def _begin_s(rank: StepObservation) -> float:
    """By the rank's own clock; an observation is dated when its step has ended."""
    return rank.observed_at_s - rank.step_s


def _from_to(begin: int, start_s: float, duration_s: float) -> tuple[int, int]:
    return begin + _ns(start_s), begin + _ns(start_s + duration_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(ns: int) -> float:
    return ns / 1000


def _pid(rank: int) -> int:
    """Viewers take process 0 for the system's own."""
    return rank + 1
