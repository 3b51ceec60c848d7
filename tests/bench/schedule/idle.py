"""Idle time of a simulated pipeline under data-blind order and under ours, by depth and mixture, and what bounds it.

Idle time is the sum over stages and ranks of the step less their own work. Its bound: the step lasts at least as long
as the mean rank of the heaviest stage works, as the longest sample takes through all stages, and as so many
microbatches of the LLM take when samples may be divided at will (a linear program over their sizes; it leaves out that
a rank passes over a microbatch that is empty for it). A plan whose stages differ idles, whatever the order.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from dflop.schedule.assignment import Assignment
from dflop.schedule.linear import LinearStep
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.warm import warm
from dflop.simulate.order import one_f_one_b
from tests.bench.figures import conclude
from tests.bench.schedule.instances import bench_step

DEPTHS = {1: (0, 1), 2: (1, 1), 4: (1, 3), 8: (2, 6), 16: (4, 12)}
"""Stages of the whole pipeline: (of the encoder, of the LLM)."""
NUM_MICROBATCHES = (8, 16, 32, 64)
NUM_RANKS, SAMPLES_PER_BUCKET = 4, 8
TARGET = 0.84
"""The largest cut in idle time that the paper reports."""


@dataclass(frozen=True)
class Idle:
    """One batch; idle seconds are of all stages and ranks together."""

    blind_s: float
    ours_s: float
    bound_s: float
    """No order idles less."""
    blind_frac: float
    ours_frac: float
    reason: str
    """What the bound comes from."""

    @property
    def cut(self) -> float:
        return 1 - self.ours_s / self.blind_s

    @property
    def best_cut(self) -> float:
        return 1 - self.bound_s / self.blind_s


def measure(depth: int, mixture: str, num_microbatches: int, seed: int, sizes: Path | None) -> Idle:
    """Data-blind order against the best of the full effort."""
    encoder_pp, llm_pp = DEPTHS[depth]
    step = bench_step(
        2 if encoder_pp else 1, mixture, num_microbatches * NUM_RANKS * SAMPLES_PER_BUCKET,
        num_microbatches=num_microbatches, num_ranks=NUM_RANKS, encoder_pp=max(1, encoder_pp), llm_pp=llm_pp,
        encoder_dp=NUM_RANKS, seed=seed, sizes=sizes,
    )  # fmt: skip
    job = StepJob(step.plan, step.batch, step.cost)
    blind, blind_busy = _idle(job, job.assign("arrival", Effort()))
    ours, busy = _idle(job, job.best(Effort())[1])
    least, reason = least_step_s(job.linear)
    num_nodes = job.judge.shape.num_nodes
    bound = min(ours, max(0.0, num_nodes * least - busy))
    return Idle(blind, ours, bound, blind / (blind + blind_busy), ours / (ours + busy), reason)


def _idle(job: StepJob, assignment: Assignment) -> tuple[float, float]:
    """(idle, busy) seconds."""
    work = job.judge.work(assignment)
    busy_s = float(np.where(work.is_active, work.forward_s + work.backward_s, 0.0).sum())
    return job.judge.shape.num_nodes * job.judge.step_s(assignment) - busy_s, busy_s


def least_step_s(step: LinearStep) -> tuple[float, str]:
    """Seconds that no assignment and no order stays below, and why."""
    num_encoder_stages = int(step.pipe_pp[:-1].sum())
    kinds, fixed = step.stage_kind[num_encoder_stages:], step.fixed_s[num_encoder_stages:]
    through = step.chain_s[kinds] + fixed[:, None]
    buckets = int(np.ceil(step.tokens.sum() / (step.cap_tokens * step.num_ranks)))
    work = step.chain_s[kinds].sum(axis=1) / step.num_ranks + buckets * fixed
    found = [(float(work.max()), "LLM work")]
    shares = tuple(np.round(work / work.max(), 3).tolist())
    fracs = tuple(np.round(step.forward_frac[num_encoder_stages:], 3).tolist())
    stretch = _divisible(step.num_slots, shares, fracs)
    found.append((float(work.max()) * stretch, "number of microbatches" if stretch > 1.005 else "LLM work"))
    found += [(float(step.slot_s[q].sum()), "encoder work") for q in step.stage_kind[:num_encoder_stages]]
    alone = through.sum(axis=0)
    first = 0
    for pp in step.pipe_pp[:-1]:
        own = step.stage_kind[first : first + pp]
        alone = np.maximum(alone, through.sum(axis=0) + np.maximum(step.largest_s[own], step.slot_s[own]).sum(axis=0))
        first += int(pp)
    found.append((float(alone.max()), "longest sample"))
    return max(found)


@functools.cache
def _divisible(num_slots: int, shares: tuple[float, ...], fracs: tuple[float, ...]) -> float:
    """Shortest step over all sizes of microbatches that add up to 1 on the heaviest stage; shares are of the stages."""
    depth = len(shares)
    sizes = 2 * depth * num_slots  # columns: ends of operations, sizes of slots, the step
    rows: list[dict[int, float]] = []

    def op(stage: int, phase: str, k: int) -> int:
        return (2 * stage + (phase == "B")) * num_slots + k

    for s in range(depth):
        before: list[int] = []
        for a in one_f_one_b(num_slots, depth - 1 - s):
            own, k = op(s, a.phase, a.microbatch), a.microbatch
            share = shares[s] * (fracs[s] if a.phase == "F" else 1 - fracs[s])
            neighbour = s - 1 if a.phase == "F" else s + 1
            waits = [op(neighbour, a.phase, k)] if 0 <= neighbour < depth else []
            rows.append({own: -1.0, sizes + k: share})
            rows += [{own: -1.0, sizes + k: share, w: 1.0} for w in before + waits]
            before = [own]
        rows.append({before[0]: 1.0, sizes + num_slots: -1.0})
    matrix = sparse.dok_array((len(rows), sizes + num_slots + 1))
    for i, row in enumerate(rows):
        for j, value in row.items():
            matrix[i, j] = value
    total = np.zeros((1, sizes + num_slots + 1))
    total[0, sizes : sizes + num_slots] = 1.0
    goal = np.zeros(sizes + num_slots + 1)
    goal[-1] = 1.0
    found = linprog(goal, A_ub=matrix.tocsr(), b_ub=np.zeros(len(rows)), A_eq=total, b_eq=[1.0], method="highs")
    assert found.success, found.message
    return float(found.fun)


def main(sizes: Path | None, seeds: Sequence[int], json_path: Path | None) -> None:
    warm()
    print(f"simulated idle time, {NUM_RANKS} ranks, {SAMPLES_PER_BUCKET} samples per bucket; target {TARGET:.0%} less")
    rows = []
    for depth in DEPTHS:
        for mixture in ("mild", "heavy"):
            for num_microbatches in NUM_MICROBATCHES:
                cells = [measure(depth, mixture, num_microbatches, seed, sizes) for seed in seeds]
                print(f"  {depth} stages, {mixture}, {num_microbatches}", file=sys.stderr, flush=True)
                cut, best = (statistics.mean(getattr(c, name) for c in cells) for name in ("cut", "best_cut"))
                shares = [statistics.mean(getattr(c, name) for c in cells) for name in ("blind_frac", "ours_frac")]
                print(
                    f"{depth:2d} stages, {num_microbatches:2d} microbatches, {mixture:5s}   idle {shares[0]:5.1%} -> "
                    f"{shares[1]:5.1%}   {cut:5.1%} less {'reached' if cut >= TARGET else '       '}   "
                    f"at most {best:5.1%} ({statistics.mode(c.reason for c in cells)})",
                    flush=True,
                )
                rows.append(
                    {
                        "num_stages": depth, "mixture": mixture, "num_microbatches": num_microbatches,
                        "cells": [vars(c) for c in cells],
                    }
                )  # fmt: skip
    conclude({"simulated": True, "real_sizes": sizes is not None, "rows": rows}, [], json_path, "numba", "numpy")
