"""One global batch under both policies, process by process: what ran when, what was predicted, which samples it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflop.records import LLM, Plan, SampleShape, StepObservation, StepPlan
from dflop.report.comparison import BatchPair
from dflop.report.observed_steps import MeasuredStep
from dflop.report.plots import MAX_LANES
from dflop.report.predicted import PredictedOp, PredictedStep, fits, plan_that_ran, simulate_again
from dflop.report.tables import POLICY_NAMES, stage_name

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
MAX_BARS = 6_000
"""Of a drawing: more would make a page of several MB."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing a process did. Times count from the start of the step."""

    kind: str
    """`forward`, `backward`, or `update`: gradient reduction, waiting included, and optimizer."""
    microbatch: int
    """-1 for the update."""
    start_s: float
    duration_s: float
    predicted_s: float = math.nan
    """What the cost model said of it; NaN where nobody asked it."""
    compute_s: float = math.nan
    """What the cost model is about: without waiting for a core."""
    num_tokens: int = 0
    items: tuple[tuple[int, int], ...] = ()
    """(position of the sample in the global batch, item of the sample); the item is -1 where it is the sample."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One process."""

    name: str
    bars: tuple[Bar, ...]
    """Measured."""
    predicted: tuple[PredictedOp, ...]
    """Simulated; empty where no predictions were recorded."""


@dataclass(frozen=True, slots=True)
class Track:
    """The step under one policy."""

    policy: str
    """For people."""
    step: int
    """Of the comparison, counted from 0."""
    step_s: float
    idle_frac: float
    predicted_s: float
    """Of forward and backward; NaN without predictions."""
    lanes: tuple[Lane, ...]
    num_ranks: int
    """Shown or not."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The same global batch, data-blind and balanced."""

    tracks: tuple[Track, ...]
    num_microbatches: int
    samples: tuple[SampleShape | None, ...]
    """The global batch in arrival order; None for a sample whose shape is not at hand."""

    @property
    def end_s(self) -> float:
        """Of the longest step, measured or simulated."""
        simulated = [track.predicted_s for track in self.tracks if not math.isnan(track.predicted_s)]
        return max(*(track.step_s for track in self.tracks), *simulated)


def batch_timeline(
    pair: BatchPair,
    plan: Plan,
    step_plans: Iterable[StepPlan] = (),
    shapes: Mapping[int, SampleShape] | None = None,
    max_concurrency: int | None = None,
) -> Timeline:
    """The typical step of either policy.

    Args:
        pair: Steps of one global batch.
        plan: Layout.
        step_plans: Of the comparison; without that of a step nobody knows which samples a microbatch had.
        shapes: By sample index.
        max_concurrency: Processes that can compute at once; None: each has a device of its own.
    """
    known = list(step_plans)
    most = max(1, min(MAX_LANES, MAX_BARS // max(1, 8 * plan.num_microbatches)))
    tracks = []
    for step in pair.typical():
        step_plan = plan_that_ran((p for p in known if p.step == step.step), step.predicted_step_s)
        tracks.append(_track(step, plan, step_plan, most, max_concurrency))
    samples = [(shapes or {}).get(index) for index in pair.sample_index]
    return Timeline(tuple(tracks), plan.num_microbatches, tuple(samples))


def lane_name(plan: Plan, rank: StepObservation) -> str:
    """`3: llm pp0 dp1`."""
    return f"{rank.rank}: {stage_name(plan, rank.module, rank.stage)} dp{rank.dp_rank}"


def _track(step: MeasuredStep, plan: Plan, step_plan: StepPlan | None, most: int, max_concurrency: int | None) -> Track:
    if step_plan is not None and not fits(plan, step_plan):
        step_plan = None
    again = simulate_again(plan, step_plan, step.ranks, max_concurrency) if step_plan else None
    return Track(
        policy=POLICY_NAMES.get(step.policy, step.policy),
        step=step.step,
        step_s=step.step_s,
        idle_frac=step.idle_frac,
        predicted_s=again.pipeline_s if again else math.nan,
        lanes=tuple(_lane(rank, plan, step_plan, again) for rank in step.ranks[:most]),
        num_ranks=len(step.ranks),
    )


def _lane(rank: StepObservation, plan: Plan, step_plan: StepPlan | None, again: PredictedStep | None) -> Lane:
    bars: list[Bar] = []
    for span in rank.spans:
        items = _items(plan, step_plan, rank, span.microbatch)
        for kind, start_s, duration_s, predicted_s, compute_s in (
            (FORWARD, span.forward_start_s, span.forward_s, span.predicted_forward_s, span.forward_compute_s),
            (BACKWARD, span.backward_start_s, span.backward_s, span.predicted_backward_s, span.backward_compute_s),
        ):
            if duration_s > 0:
                known_s = predicted_s if predicted_s > 0 else math.nan
                bars.append(Bar(kind, span.microbatch, start_s, duration_s, known_s, compute_s, span.num_tokens, items))
    update_s = rank.reduce_s + rank.optimizer_s
    if update_s > 0:
        bars.append(Bar(UPDATE, -1, rank.step_s - update_s, update_s))
    node = (rank.module, rank.stage, rank.dp_rank)
    predicted = tuple(op for op in again.of(node) if op.duration_s > 0) if again else ()
    return Lane(lane_name(plan, rank), tuple(sorted(bars, key=lambda bar: bar.start_s)), predicted)


def _items(
    plan: Plan, step_plan: StepPlan | None, rank: StepObservation, microbatch: int
) -> tuple[tuple[int, int], ...]:
    """What a microbatch of a rank is made of: samples, or of an encoder's own stages media items."""
    if step_plan is None or microbatch >= plan.num_microbatches:
        return ()
    is_whole = rank.module == LLM or plan.is_inline
    work = step_plan.of(LLM if is_whole else rank.module)
    ids: Sequence[int] = work.owner[microbatch][rank.dp_rank]
    return tuple((work.item_sample[i], -1 if is_whole else work.item_rank_in_sample[i]) for i in ids)
