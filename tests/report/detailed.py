"""Runs as the engine would leave them: scheduled, predicted and simulated by the real rooms, with noise where they ran.

What ranks measured is the simulation under noisy seconds, so starts, waits and reductions fit together.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import datetime

import numpy as np

from dflop.cost.model import CostModel
from dflop.cost.terms import BYTES, SECONDS, Term
from dflop.records import (
    LLM,
    JobRecord,
    MicrobatchSpan,
    Plan,
    QuarantinedSample,
    RankMemory,
    RankSpan,
    RunInput,
    SampleShape,
    StepFlops,
    StepObservation,
    StepPlan,
)
from dflop.report.history_table import HistoryEntry
from dflop.report.summary import RunSummary
from dflop.schedule.step_scheduler import predicted_spans, schedule_step
from dflop.simulate.order import actions, num_stages_after
from dflop.simulate.step import Node, step_nodes
from tests.builders import make_cluster, make_corrections, make_plan, make_rank_factor, make_table, random_batch
from tests.report.runs import HOSTILE, make_run, observe, speedups_of
from tests.simulate.graph import op_id, simulate, step_graph

UPDATE_S = 0.003
NOON = datetime(2026, 7, 1, 12)
COST = CostModel(make_table(module, tp=tp) for module in ("vision", "audio", LLM) for tp in (1, 2))
SPLIT = dataclasses.replace(
    make_plan({"vision": 2, "audio": 1, LLM: 1}, llm_pp=2, num_microbatches=4, global_batch_size=16),
    plan_id="plan-0", predicted_step_s=0.30, baseline_step_s=0.36, uniform_step_s=0.40, sync_s=0.004, snapshot_seq=3,
    reason="fastest of 38 layouts",
)  # fmt: skip


def batch_of(number: int, num_samples: int = 16) -> tuple[SampleShape, ...]:
    """A global batch, its samples numbered from `100 * number`."""
    found = []
    for i, sample in enumerate(random_batch(num_samples, seed=number)):
        name = HOSTILE if i == 0 else f"sample-{number}-{i}"
        found.append(dataclasses.replace(sample, sample_index=100 * number + i, sample_id=name))
    return tuple(found)


def plan_step(plan: Plan, batch: Sequence[SampleShape], step: int, policy: str, run_id: str) -> StepPlan:
    """The step plan that the scheduler makes, under the name of its policy."""
    how = "arrival" if policy == "arrival" else "quick"  # no search, no kernels: what is searched well is not the point
    found = schedule_step(run_id=run_id, step=step, plan=plan, batch=batch, cost=COST, policy=how)
    return dataclasses.replace(found, policy=policy)


def observe_step(
    plan: Plan,
    step_plan: StepPlan,
    batch: Sequence[SampleShape],
    *,
    noise: float = 0.05,
    seed: int = 0,
    attempt: int = 1,
    started_at_s: float = 1000.0,
    loss: float = 2.0,
) -> list[StepObservation]:
    """What every rank saw of the step, those of a tensor-parallel group the same."""
    rng = np.random.default_rng([seed, step_plan.step])
    predicted = predicted_spans(plan, step_plan, batch, COST)
    nodes, m = step_nodes(plan), plan.num_microbatches
    measured: dict[Node, list[tuple[float, float]]] = {
        node: [tuple(np.array([s.forward_s, s.backward_s]) * rng.lognormal(0, noise, 2)) for s in predicted[node]]
        for node in nodes
    }
    nothing = [(0.0, 0.0)] * m
    durations: Mapping[Node, Sequence[tuple[float, float]]] = measured
    if len(plan.grids) == 1:
        durations = measured | {(e.module, *node[1:]): nothing for e in plan.encoders for node in nodes}
    ran = simulate(step_graph(plan, step_plan.work, durations))
    step_s = ran.makespan_s + UPDATE_S
    owner = {work.module: work.owner for work in step_plan.work}
    found = []
    for i, (module, stage, dp_rank) in enumerate(nodes):
        spans = []
        for k in range(m):
            if not owner[module][k][dp_rank]:
                continue
            forward, backward = op_id(m, i, k, "F"), op_id(m, i, k, "B")
            forward_s, backward_s = (ran.end_s[op] - ran.start_s[op] for op in (forward, backward))
            told = predicted[module, stage, dp_rank][k]
            spans.append(
                MicrobatchSpan(
                    k, told.num_items, told.num_tokens, told.sum_sq_tokens, told.forward_s, told.backward_s,
                    ran.start_s[forward], forward_s, ran.start_s[backward], backward_s, forward_s, backward_s,
                )
            )  # fmt: skip
        own_end_s = max((s.backward_start_s + s.backward_s for s in spans), default=0.0)
        place = plan.module(module)
        for tp_rank in range(place.parallel.tp):
            rank = place.first_rank + (stage * place.parallel.dp + dp_rank) * place.parallel.tp + tp_rank
            found.append(
                observe(
                    step_plan.step, rank, run_id=step_plan.run_id, attempt=attempt, policy=step_plan.policy,
                    module=module, stage=stage, dp_rank=dp_rank, predicted_step_s=step_plan.predicted_step_s,
                    step_s=step_s, busy_s=sum(s.forward_s + s.backward_s for s in spans), data_wait_s=0.002,
                    schedule_wait_s=0.001, reduce_s=step_s - UPDATE_S / 3 - own_end_s, optimizer_s=UPDATE_S / 3,
                    loss=loss, num_supervised_tokens=step_plan.num_supervised_tokens,
                    observed_at_s=started_at_s + step_s, spans=spans,
                )
            )  # fmt: skip
    return found


def spans_of(plan: Plan, seen: StepObservation) -> list[RankSpan]:
    """What a traced step of a rank leaves: its spans tile the step, and three are outside."""
    after = num_stages_after(plan, seen.module, seen.stage)
    of = {s.microbatch: s for s in seen.spans}
    place = (seen.run_id, seen.attempt, seen.step, seen.rank, seen.module, seen.stage, seen.dp_rank, 0)
    found = [
        RankSpan(*place, "schedule_wait", -1, -0.02, seen.schedule_wait_s, 0),
        RankSpan(*place, "data_wait", -1, -seen.data_wait_s, seen.data_wait_s, 0),
    ]
    at_s = 0.0
    for action in actions(plan.num_microbatches, after):
        span = of.get(action.microbatch)
        if span is None:
            continue
        is_forward = action.phase == "F"
        start_s, busy_s = (
            (span.forward_start_s, span.forward_s) if is_forward else (span.backward_start_s, span.backward_s)
        )
        name = "forward" if is_forward else "backward"
        found.append(RankSpan(*place, "receive_wait", action.microbatch, at_s, start_s - at_s, 100))
        found.append(RankSpan(*place, name, action.microbatch, start_s, busy_s, 0))
        at_s = start_s + busy_s
    updated_s = seen.step_s - seen.optimizer_s
    found.append(RankSpan(*place, "reduce", -1, updated_s - seen.reduce_s, seen.reduce_s, 0))
    found.append(RankSpan(*place, "optimizer", -1, updated_s, seen.optimizer_s, 0))
    return found


def detailed(plan: Plan = SPLIT, *, num_steps: int = 24, num_batches: int = 4, run_id: str = "run") -> RunSummary:
    """A finished run of training and comparison with everything a report can show."""
    at_s = 1000.0
    train: list[StepObservation] = []
    for step in range(num_steps):
        batch = batch_of(step % 6)
        step_plan = plan_step(plan, batch, step, "quick", run_id)
        seen = observe_step(plan, step_plan, batch, started_at_s=at_s, loss=2.0 + 5.0 * 0.9**step)
        train += seen
        at_s += 0.01 + seen[0].step_s
    compare: list[StepObservation] = []
    plans: list[StepPlan] = []
    for step in range(4 * num_batches):
        batch = batch_of(step // 4)
        policy = ("arrival", "balanced", "balanced", "arrival")[step % 4]
        plans.append(plan_step(plan, batch, step, policy, f"{run_id}/compare"))
        compare += observe_step(plan, plans[-1], batch, started_at_s=at_s + step)
    sized = dataclasses.replace(
        plan, modules=tuple(dataclasses.replace(m, stage_memory_bytes=(2**29,) * m.parallel.pp) for m in plan.modules)
    )
    return RunSummary(
        run=dataclasses.replace(make_run(), run_id=run_id),
        cluster=make_cluster(plan.num_processes, num_cores=64),
        plan=sized,
        candidates=[sized, *(dataclasses.replace(sized, plan_id=f"p{i}", candidate_rank=i) for i in range(1, 12))],
        train=train,
        compare=compare,
        speedups=speedups_of(compare, plans),
        quarantined=(
            QuarantinedSample("data", 7, HOSTILE, "profile", "images/cut off.jpg", "truncated JPEG: 812 of 4096 bytes"),
            QuarantinedSample("data", 93, "clip-93", "train", "video/[x](http://evil).mp4", "no video stream | <b>"),
        ),
        history=(
            HistoryEntry(0.0, None, None, "run", "demo", "running", None, None, "dflop abc", NOON),
            HistoryEntry(75.0, 9, 1, "slow_rank", "rank 2", "noticed", None, None, "30 % slower on <b>host1</b>", NOON),
            HistoryEntry(3725.4, 12, 1, "plan", "plan-0", "chosen", None, None, "another layout", NOON),
        ),
        facts=(("model", "tiny"), ("dataset", "/data/<script>.jsonl")),
        compare_plans=tuple(plans),
        correction_rows=tuple(_corrections()),
        rank_factors=(make_rank_factor(2, 1.3), make_rank_factor(0, 1.0)),
        flops=tuple(StepFlops(run_id, 1, step, 1e12, 4e13) for step in range(num_steps)),
        peaks=tuple(
            RankMemory(run_id, 1, 20, s.rank, s.module, s.stage, s.dp_rank, 0, "allocated", 2**29 + 2**20 * s.rank, 0.0)
            for s in train[: plan.num_processes]
        ),
        jobs=(
            JobRecord(run_id, f"{run_id}-data", "profile/0", "local", "1", "running", "", "/j", 2, 0, 10.0),
            JobRecord(run_id, f"{run_id}-data", "profile/0", "local", "1", "done", "", "/j", 2, 0, 46.0),
            JobRecord(run_id, f"{run_id}-train", f"{run_id}/train", "local", "2", "running", "", "/j", 4, 0, 50.0),
            JobRecord(run_id, f"{run_id}-train", f"{run_id}/train", "local", "2", "done", "", "/j", 4, 0, 90.0),
        ),
        inputs=(RunInput(run_id, "train", 1, 3, "rev", "data", "model", ("llm-tp1",), 1000.0),),
        terms=(
            Term("llm tp1: forward of a layer", 1.5e-3, 2.5e-3, "measured", SECONDS),
            Term("llm tp1: kept by a layer", math.nan, 3 << 20, "measured", BYTES),
        ),
        cost_sources=tuple((f"{m.module} tp1", "measured") for m in plan.modules),
        num_steps_planned=num_steps,
        config_text="name: demo  # </pre><script>alert(1)</script>\n",
    )


def _corrections() -> list:
    return [
        row
        for t in (3, 9, 15)
        for m, edges in ((LLM, (100, 900)), ("vision", ()))
        for row in make_corrections(
            m, [1.0 + t / 50 + i / 4 for i in range(len(edges) + 1)], edges, level=1.0 + t / 50, effective_step=t,
            observed_at_s=1000.0 + t, is_in_force=t > 3,
        )
    ]  # fmt: skip
