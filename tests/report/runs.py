"""Constructed runs whose numbers can be checked by hand, and one that looks like a real run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflop.records import ClusterSpec, MicrobatchSpan, Plan, QuarantinedSample, RunRecord, StepObservation, StepPlan
from dflop.records.speedup import NOT_COMPARED, Speedup, speedup
from dflop.report.comparison import compare_policies
from dflop.report.observed_steps import measured_steps
from dflop.report.summary import RunSummary
from tests.builders import make_cluster, make_corrections, make_plan

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


def speedups_of(seen: Sequence[StepObservation], plans: Sequence[StepPlan]) -> tuple[Speedup, Speedup]:
    """What the store's view says of these steps; tests/store/test_speedup.py holds it to that."""
    found = compare_policies(measured_steps(seen), plans, NOT_COMPARED, NOT_COMPARED)
    sides = [(pair.arrival, pair.balanced) for pair in found.pairs] if found else []

    def of(name: str) -> Speedup:
        medians = [[statistics.median(getattr(s, name) for s in side) for side in both] for both in sides]
        return speedup([arrival for arrival, _ in medians], [balanced for _, balanced in medians])

    return of("step_s"), of("predicted_step_s")


def comparison_of(
    batches: Sequence[tuple[Sequence[float], Sequence[float]]], *, predicted: tuple[float, float] = (1.2, 1.0)
) -> tuple[list[StepObservation], list[StepPlan]]:
    """Single-rank comparison: per global batch the arrival and the balanced step times; two warm-up steps first."""
    seen = [observe(step, policy="warmup", step_s=100.0) for step in range(2)]
    plans = [step_plan(step, [step], "warmup") for step in range(2)]
    for batch, sides in enumerate(batches):
        for policy, predicted_s, times in zip(("arrival", "balanced"), predicted, sides, strict=True):
            for step_s in times:
                step = len(seen)
                seen.append(observe(step, policy=policy, step_s=step_s, predicted_step_s=predicted_s))
                plans.append(step_plan(step, [batch, batch + 100], policy))
    return seen, plans


def realistic(seed: int = 0, *, compare: bool = True) -> RunSummary:
    """A run of 40 steps on 4 processes (vision dp2, audio, llm), with hostile strings where a user's data goes."""
    rng = np.random.default_rng(seed)
    plan = make_plan({"vision": 2, "audio": 1, "llm": 1}, num_microbatches=6)
    train = [seen for t in range(40) for seen in _step(rng, t, "balanced", loss=2.0 + 5.5 * math.exp(-t / 12))]
    batch_scale = rng.uniform(0.8, 1.4, 5)
    seen: list[StepObservation] = []
    plans: list[StepPlan] = []
    for step in range(22 if compare else 0):
        policy = "warmup" if step < 2 else ("arrival", "balanced")[(step // 2 + step) % 2]
        batch = (step // 2 - 1) % 5
        seen += _step(rng, step, policy, scale=batch_scale[batch] * (1.12 if policy == "arrival" else 1.0))
        plans.append(step_plan(step, [batch], policy))
    return RunSummary(
        run=make_run(),
        cluster=make_cluster(),
        plan=_ranked(plan, 0),
        candidates=[_ranked(plan, rank) for rank in (0, 1, 2)],
        train=train,
        compare=seen,
        speedups=speedups_of(seen, plans),
        quarantined=[
            QuarantinedSample("data", 7, HOSTILE, "profile", "images/cut off.jpg", "truncated JPEG: 812 of 4096 bytes"),
            QuarantinedSample("data", 93, "clip-93", "train", "video/[x](http://evil).mp4", "no video stream | <b>"),
        ],
        compare_plans=tuple(plans), correction_rows=tuple(
            row
            for t in (3, 9)
            for m, edges in (("llm", (100, 900)), ("audio", ()))
            for row in make_corrections(
                m, [1.0 + t / 50 + i / 4 for i in range(len(edges) + 1)], edges, level=1.0 + t / 50, effective_step=t,
                observed_at_s=float(t), is_in_force=m == "audio" or t > 3, num_observations=40 * t,
            )
        ),
    )  # fmt: skip


def _ranked(plan: Plan, rank: int) -> Plan:
    return replace(
        plan, plan_id=f"plan-{rank}", candidate_rank=rank, predicted_step_s=0.71 + 0.05 * rank,
        baseline_step_s=0.78 + 0.05 * rank, sync_s=0.02, uniform_step_s=0.96, snapshot_seq=3,
        reason="fastest of 38 layouts" if rank == 0 else f"{7 * rank} % slower: the vision encoder waits for the LLM",
    )  # fmt: skip


def _step(rng: np.random.Generator, step: int, policy: str, *, scale: float = 1.0, loss: float = math.nan):
    """Four ranks; encoders run ahead of the LLM by one microbatch."""
    lanes = (("vision", 0, 0.025), ("vision", 1, 0.02), ("audio", 0, 0.015), ("llm", 0, 0.035))
    seen, end_s = [], 0.0
    for module, dp_rank, forward_s in lanes:
        at_s, spans = 0.03 if module == "llm" else 0.0, []
        for k in range(6):
            f, b = scale * forward_s * rng.uniform(0.6, 1.5, 2) * (1, 2)
            spans.append(MicrobatchSpan(k, 2, 300, 9000, f * 0.9, b * 1.05, at_s, f, at_s + f + 0.004, b, f, b))
            at_s += f + b + 0.006
        seen.append((module, dp_rank, spans))
        end_s = max(end_s, at_s)
    update_s, noise = 0.03, rng.normal(0, 0.15)
    return [
        observe(
            step, rank, policy=policy, module=module, dp_rank=dp_rank, step_s=end_s + update_s, update_s=update_s,
            busy_s=sum(s.forward_s + s.backward_s for s in spans), predicted_step_s=0.95 * end_s, spans=spans,
            loss=loss + noise,
        )
        for rank, (module, dp_rank, spans) in enumerate(seen)
    ]  # fmt: skip
