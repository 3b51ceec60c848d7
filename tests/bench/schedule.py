"""What scheduling is worth and costs: `python -m tests.bench.schedule --part NAME [--sizes TABLE] [--seeds N]`.

`bottleneck`: how far the certified balance's worst bucket is above what no assignment can stay below, and its
processor time. `makespan`: simulated seconds that the search takes off a step of that balance, under the same caps.
Both simulate, on costs of a data sheet. `real` is measured, on this machine's cores: `schedule_real.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflop.records import LLM
from dflop.schedule.caps import plan_caps
from dflop.schedule.items import module_items
from dflop.schedule.linear import linear_step, sample_weights
from dflop.schedule.pack import bottleneck, lower_bound, pack, token_cap
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.warm import warm
from dflop.simulate.jit import IS_COMPILED
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.instances import BenchStep, bench_step

MIXTURES = ("mild", "heavy")
SIZES = ((64, 8), (256, 32), (1024, 64), (1024, 128), (1024, 256), (4096, 256), (16384, 1024))
"""Samples, buckets."""
NUM_RANKS, MAX_EVALS, NUM_REPEATS = 4, 1_000_000, 5
CPU_BOUND_MS = {1024: 10.0, 16384: 150.0}
TYPICAL_GAP_FRAC, LARGEST_GAP_FRAC, ROUNDING = 1e-3, 1e-2, 1e-9
CERTIFIED = Effort(max_evals=20_000_000)
"""The yardstick of `makespan`."""
MIN_REDUCTION = {"mild": 0.08, "heavy": 0.13}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=("bottleneck", "makespan", "real"), default="bottleneck")
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated mixtures without")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    if args.part == "real":
        from tests.bench import schedule_real  # torch, which the other parts do without

        schedule_real.main(args.sizes, range(args.seeds), args.json)
        return
    warm()
    part = bottlenecks if args.part == "bottleneck" else makespans
    cells, bounds = part(args.sizes, range(args.seeds))
    content = {"simulated": True, "real_sizes": args.sizes is not None, "cells": cells}
    conclude(content, bounds, args.json, "numba", "numpy")


def bottlenecks(sizes: Path | None, seeds: range) -> tuple[list[dict[str, Any]], list[tuple[str, bool]]]:
    print("samples x buckets, modules, mixture: largest gap; largest CPU time")
    cells, bounds = [], []
    for (num_samples, num_buckets), modules, mixture in itertools.product(SIZES, (1, 2, 3), MIXTURES):
        name = f"{num_samples} x {num_buckets}, {modules} modules, {mixture}"
        cell: dict[str, Any] = {"name": name, "gap_frac": [], "cpu_ms": []}
        for seed in seeds:
            step = bench_step(
                modules, mixture, num_samples, num_microbatches=num_buckets // NUM_RANKS, num_ranks=NUM_RANKS,
                seed=seed, sizes=sizes,
            )  # fmt: skip
            _bottleneck(cell, step, num_buckets)
        gap_frac, cpu_ms = max(cell["gap_frac"]), max(cell["cpu_ms"])
        bounds.append((f"{name}: gap {gap_frac:.2%}", gap_frac <= LARGEST_GAP_FRAC))
        if num_samples in CPU_BOUND_MS:
            bounds.append((f"{name}: {cpu_ms:.1f} ms", cpu_ms <= CPU_BOUND_MS[num_samples]))
        print(f"{name:34s} {gap_frac:8.3%} {cpu_ms:8.2f} ms", flush=True)
        cells.append(cell)
    typical = float(np.median([gap for cell in cells for gap in cell["gap_frac"]]))
    bounds.append((f"typical gap {typical:.3%}", typical <= TYPICAL_GAP_FRAC * (1 + ROUNDING)))
    return cells, bounds


def _bottleneck(cell: dict[str, Any], step: BenchStep, num_buckets: int) -> None:
    items = {m.module: module_items(step.batch, m.module) for m in step.plan.modules}
    caps, tokens = plan_caps(step.plan, items, compiled=IS_COMPILED), items[LLM].num_tokens
    weights = sample_weights(linear_step(step.plan, items, step.cost.extrapolating(), caps))
    cap = token_cap(tokens, num_buckets)
    for repeat in range(NUM_REPEATS + 1):
        began_s = time.thread_time()
        packing = pack(weights, tokens, num_buckets, cap_tokens=cap, max_evals=MAX_EVALS)
        if repeat:  # the first one warms the caches
            cell["cpu_ms"].append(1e3 * (time.thread_time() - began_s))
    cell["gap_frac"].append(max(0.0, packing.bottleneck_s / packing.lower_bound_s - 1))


def makespans(sizes: Path | None, seeds: range) -> tuple[list[dict[str, Any]], list[tuple[str, bool]]]:
    print(
        "simulated seconds of a step, less than the certified balance's under the same caps by; CPU time of the search"
    )
    cells, bounds = [], []
    for modules, mixture in itertools.product((2, 3, 1), MIXTURES):
        cell: dict[str, Any] = {
            "name": f"{modules} modules, {mixture}", "num_samples": 1024, "gap_frac": [], "reduction": {"full": []},
            "cpu_ms": {"full": []},
        }  # fmt: skip
        steps = (
            bench_step(
                modules, mixture, cell["num_samples"], num_microbatches=16, num_ranks=8, encoder_pp=2, llm_pp=6,
                encoder_dp=8, seed=seed, sizes=sizes,
            )
            for seed in seeds
        )  # fmt: skip
        is_same = all([_makespan(cell, step) for step in steps])
        reduction, cpu_ms = np.mean(cell["reduction"]["full"]), np.median(cell["cpu_ms"]["full"])
        bounds.append((f"{cell['name']}: {reduction:.1%} less", bool(reduction >= MIN_REDUCTION[mixture])))
        bounds.append((f"{cell['name']}: two threads find the same", is_same))
        print(f"{cell['name']:20s} {reduction:6.1%} {cpu_ms:6.0f} ms", flush=True)
        cells.append(cell)
    return cells, bounds


def _makespan(cell: dict[str, Any], step: BenchStep) -> bool:
    """Whether a second search, on two threads, finds the very same."""
    job = StepJob(step.plan, step.batch, step.cost)
    yardstick = job.assign("bottleneck", CERTIFIED)
    weights, bucket = sample_weights(job.linear), yardstick.slot * job.linear.num_ranks + yardstick.rank
    bound_s = lower_bound(weights, job.num_buckets)
    cell["gap_frac"].append(bottleneck(weights, bucket, job.num_buckets) / bound_s - 1)
    began_s = time.thread_time()
    _, found, step_s = StepJob(step.plan, step.batch, step.cost).best(Effort())  # from shapes to the assignment
    cell["cpu_ms"]["full"].append(1e3 * (time.thread_time() - began_s))
    assert job.keeps_caps(yardstick)
    assert job.keeps_caps(found)
    cell["reduction"]["full"].append(1 - step_s / job.judge.step_s(yardstick))
    again = StepJob(step.plan, step.batch, step.cost, num_threads=2).best(Effort())[1]
    return bool((again.slot == found.slot).all() and (again.rank == found.rank).all())


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`packing-simulated`: what the search takes off a balance of all modules, on the largest batches."""
    cells = content["cells"]
    size = max(cell["num_samples"] for cell in cells)
    cells = [cell for cell in cells if cell["num_samples"] == size]
    taken = [100 * np.mean(cell["reduction"]["full"]) for cell in cells]
    cpu_s = np.median([ms for cell in cells for ms in cell["cpu_ms"]["full"]]) / 1e3
    rows = "real sample sizes" if content["real_sizes"] else "generated samples"
    return {
        "packing-simulated": f"**Simulated** on the A100's data sheet, {size:,} samples a global batch, {rows}: a "
        f"step is {min(taken):.0f} to {max(taken):.0f} % shorter than under a balance of all modules (means of "
        f"{len(cells[0]['gap_frac'])} batches, {len(cells)} plans), found in {cpu_s:.2f} s of one core (median)."
    }  # fmt: skip


if __name__ == "__main__":
    main()
