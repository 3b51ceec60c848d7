"""Constructed steps whose numbers can be checked by hand."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflop.records import ClusterSpec, MicrobatchSpan, RunRecord, StepObservation, StepPlan
from dflop.records.speedup import Speedup, speedup
from dflop.report.comparison import ARRIVAL, BALANCED, compare_policies
from dflop.report.observed_steps import MeasuredStep, measured_steps
from dflop.report.tables import POLICY_NAMES

HOSTILE = "<script>alert('sample')</script>"
CUDA = ClusterSpec("gpus", "slurm", 1, 2, 2**36, "cuda", 8)


def make_run(state: str = "done") -> RunRecord:
    return RunRecord("run", "demo", "cfgkey", state, "2x core", "torch 2", "abc123", "/runs/run", 0.0)


def make_span(microbatch: int, forward_s: float, backward_s: float, *, num_tokens: int = 0, predicted: float = 1.0):
    """Span starting at the microbatch number times both lengths; predictions are `predicted` times the measured."""
    start_s = microbatch * (forward_s + backward_s)
    return MicrobatchSpan(
        microbatch, 1, num_tokens, 0, predicted * forward_s, predicted * backward_s, start_s, forward_s,
        start_s + forward_s, backward_s, forward_s, backward_s,
    )  # fmt: skip


SEEN = StepObservation(
    "run", 0, 0, "balanced", 0, "llm", 0, 0, predicted_step_s=1.0, step_s=1.0, busy_s=0.5, data_wait_s=0.01,
    schedule_wait_s=0.0, reduce_s=0.0, optimizer_s=0.0, loss=math.nan, grad_norm=1.0, num_supervised_tokens=10,
    observed_at_s=0.0, spans=(),
)  # fmt: skip


def observe(
    step: int, rank: int = 0, *, update_s: float = 0.0, spans: Sequence[MicrobatchSpan] = (), **changes: Any
) -> StepObservation:
    """What a rank saw of a step; half of the update goes to the reduction."""
    told = {"reduce_s": update_s / 2, "optimizer_s": update_s / 2, "observed_at_s": float(step)} | changes
    return replace(SEEN, step=step, rank=rank, spans=tuple(spans), **told)


def step_plan(step: int, batch: Sequence[int], policy: str = "balanced") -> StepPlan:
    return StepPlan("run/compare", step, policy, tuple(batch), 1, (), 10, 1.0, 1.0)


def speedups_of(seen: Sequence[StepObservation], plans: Sequence[StepPlan]) -> dict[str, tuple[Speedup, Speedup]]:
    """What the store's view says of these steps; tests/store/test_speedup.py holds it to that."""

    def of(baseline: str) -> tuple[Speedup, Speedup]:
        as_arrival = [replace(s, policy={ARRIVAL: "", baseline: ARRIVAL}.get(s.policy, s.policy)) for s in seen]
        found = compare_policies(measured_steps(as_arrival), plans, {})
        sides = [(pair.arrival, pair.balanced) for pair in found.pairs] if found else []
        return pair_of(sides, "step_s"), pair_of(sides, "predicted_step_s")

    def pair_of(sides: Sequence[tuple[Sequence[MeasuredStep], ...]], name: str) -> Speedup:
        medians = [[statistics.median(getattr(s, name) for s in side) for side in both] for both in sides]
        return speedup([baseline for baseline, _ in medians], [balanced for _, balanced in medians])

    found = {policy: of(policy) for policy in POLICY_NAMES if policy != BALANCED}
    return {policy: both for policy, both in found.items() if both[0].num_batches}


def comparison_of(
    batches: Sequence[Sequence[Sequence[float]]],
    policies: Sequence[str] = (ARRIVAL, BALANCED),
    predicted: Sequence[float] = (1.2, 1.0),
) -> tuple[list[StepObservation], list[StepPlan]]:
    """Single-rank comparison: per global batch the step times of each policy; two warm-up steps first."""
    seen = [observe(step, policy="warmup", step_s=100.0) for step in range(2)]
    plans = [step_plan(step, [step], "warmup") for step in range(2)]
    for batch, sides in enumerate(batches):
        for policy, predicted_s, times in zip(policies, predicted, sides, strict=True):
            for step_s in times:
                step = len(seen)
                seen.append(observe(step, policy=policy, step_s=step_s, predicted_step_s=predicted_s))
                plans.append(step_plan(step, [batch, batch + 100], policy))
    return seen, plans
