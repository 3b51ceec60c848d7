"""One global batch of a comparison under both policies, process by process: measured, and below it predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dflop import units
from dflop.records import MicrobatchSpan, Plan, StepObservation, StepPlan
from dflop.report.comparison import BatchPair
from dflop.report.gantt import BACKWARD, FORWARD, MAX_LANES, UPDATE, Bar, Lane, StepPicture, gantt
from dflop.report.observed_steps import MeasuredStep
from dflop.report.predicted import PredictedStep, plan_that_ran, simulate_again
from dflop.report.tables import POLICY_NAMES, stage_name

MAX_BARS = 3_000
"""Most bars of a drawing: more would make a page of several MB."""
LABEL = "Timeline of one global batch, arrival order above balanced: measured; below each bar simulated"


def batch_gantt(
    pair: BatchPair, plan: Plan, step_plans: Iterable[StepPlan] = (), max_concurrency: int | None = None
) -> str:
    """SVG of the typical step of either policy; see `batch_steps`."""
    return gantt("timeline", LABEL, batch_steps(pair, plan, step_plans, max_concurrency)).svg()


def batch_steps(
    pair: BatchPair, plan: Plan, step_plans: Iterable[StepPlan] = (), max_concurrency: int | None = None
) -> list[StepPicture]:
    """The typical step of either policy; of one without its plan among `step_plans` nothing is simulated."""
    known = list(step_plans)
    found = []
    for step in pair.typical():
        ran = plan_that_ran((p for p in known if p.step == step.step), step.predicted_step_s)
        again = simulate_again(plan, ran, step.ranks, max_concurrency) if ran else None
        found.append(_step(step, plan, again))
    return found


def _step(step: MeasuredStep, plan: Plan, again: PredictedStep | None) -> StepPicture:
    most = max(1, min(MAX_LANES, MAX_BARS // max(1, 8 * plan.num_microbatches)))
    shown = step.ranks[:most]
    policy = POLICY_NAMES.get(step.policy, step.policy)
    simulated = "no predictions" if again is None else f"{units.seconds(again.pipeline_s)} simulated"
    return StepPicture(
        title=f"{policy}: {units.seconds(step.step_s)}, {units.percent(step.idle_frac)} idle, measured; "
        f"forward + backward {units.seconds(step.pipeline_s)} measured, {simulated}",
        lanes=tuple(_lane(rank, plan, again) for rank in shown),
        busy_until_s=step.step_s,
        end_s=step.step_s,
        left_out=f"first {most} of {len(step.ranks)} processes" if most < len(step.ranks) else "",
    )


def _lane(rank: StepObservation, plan: Plan, again: PredictedStep | None) -> Lane:
    node = (rank.module, rank.stage, rank.dp_rank)
    name = f"{rank.rank}: {stage_name(plan, rank.module, rank.stage)} dp{rank.dp_rank}"
    bars = [bar for span in rank.spans for bar in _bars(span, name)]
    update_s = rank.reduce_s + rank.optimizer_s
    if update_s > 0:
        hint = f"{name}: gradient reduction {units.seconds(rank.reduce_s)}, waiting included, optimizer "
        hint += units.seconds(rank.optimizer_s)
        bars.append(Bar(UPDATE, rank.step_s - update_s, update_s, hint=hint))
    thin = (
        Bar(FORWARD if op.phase == "F" else BACKWARD, op.start_s, op.duration_s)
        for op in (again.of(node) if again else ())
        if op.duration_s > 0
    )
    return Lane(name, tuple(bars), tuple(thin))


def _bars(span: MicrobatchSpan, lane: str) -> Iterator[Bar]:
    for kind, start_s, duration_s, predicted_s, compute_s in (
        (FORWARD, span.forward_start_s, span.forward_s, span.predicted_forward_s, span.forward_compute_s),
        (BACKWARD, span.backward_start_s, span.backward_s, span.predicted_backward_s, span.backward_compute_s),
    ):
        if duration_s > 0:
            predicted = f", predicted {units.seconds(predicted_s)}" if predicted_s > 0 else ""
            hint = (
                f"{lane}: {kind} of microbatch {span.microbatch}, {span.num_items} items, {span.num_tokens} "
                f"tokens: measured {units.seconds(duration_s)}, of it compute {units.seconds(compute_s)}{predicted}"
            )
            yield Bar(kind, start_s, duration_s, span.microbatch, hint)
