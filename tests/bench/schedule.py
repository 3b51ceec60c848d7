"""What scheduling is worth and costs: `python -m tests.bench.schedule --part NAME [--sizes TABLE] [--seeds N]`.

`makespan`: seconds that the search takes off a step of the certified balance, under the same caps, simulated on costs
of a data sheet. `real` is measured, on this machine's cores: `schedule_real.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.warm import warm
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.instances import BenchStep, bench_step

MIXTURES = ("mild", "heavy")
CERTIFIED = Effort(max_evals=20_000_000)
"""The yardstick."""
MIN_REDUCTION = {"mild": 0.08, "heavy": 0.13}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=("makespan", "real"), default="makespan")
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated mixtures without")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    if args.part == "real":
        from tests.bench import schedule_real  # torch, which the simulation does without

        schedule_real.main(args.sizes, range(args.seeds), args.json)
        return
    warm()
    cells, bounds = makespans(args.sizes, range(args.seeds))
    content = {"simulated": True, "real_sizes": args.sizes is not None, "cells": cells}
    conclude(content, bounds, args.json, "numba", "numpy")


def makespans(sizes: Path | None, seeds: range) -> tuple[list[dict[str, Any]], list[tuple[str, bool]]]:
    print(
        "simulated seconds of a step, less than the certified balance's under the same caps by; CPU time of the search"
    )
    cells, bounds = [], []
    for modules, mixture in itertools.product((2, 3, 1), MIXTURES):
        cell: dict[str, Any] = {
            "name": f"{modules} modules, {mixture}", "num_samples": 1024, "reduction": {"full": []},
            "cpu_ms": {"full": []},
        }  # fmt: skip
        for seed in seeds:
            _makespan(cell, bench_step(modules, mixture, cell["num_samples"], seed, sizes))
        reduction, cpu_ms = np.mean(cell["reduction"]["full"]), np.median(cell["cpu_ms"]["full"])
        bounds.append((f"{cell['name']}: {reduction:.1%} less", bool(reduction >= MIN_REDUCTION[mixture])))
        print(f"{cell['name']:20s} {reduction:6.1%} {cpu_ms:6.0f} ms", flush=True)
        cells.append(cell)
    return cells, bounds


def _makespan(cell: dict[str, Any], step: BenchStep) -> None:
    job = StepJob(step.plan, step.batch, step.cost)
    yardstick = job.assign("bottleneck", CERTIFIED)
    began_s = time.thread_time()
    _, found, step_s = StepJob(step.plan, step.batch, step.cost).best(Effort())  # from shapes to the assignment
    cell["cpu_ms"]["full"].append(1e3 * (time.thread_time() - began_s))
    assert job.keeps_caps(yardstick)
    assert job.keeps_caps(found)
    cell["reduction"]["full"].append(1 - step_s / job.judge.step_s(yardstick))


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`packing-simulated`: what the search takes off a balance of all modules, on the largest batches."""
    cells = content["cells"]
    size = max(cell["num_samples"] for cell in cells)
    cells = [cell for cell in cells if cell["num_samples"] == size]
    taken = [100 * np.mean(cell["reduction"]["full"]) for cell in cells]
    cpu_s = np.median([ms for cell in cells for ms in cell["cpu_ms"]["full"]]) / 1e3
    num_batches = len(cells[0]["reduction"]["full"])
    rows = "real sample sizes" if content["real_sizes"] else "generated samples"
    return {
        "packing-simulated": f"**Simulated** on the A100's data sheet, {size:,} samples a global batch, {rows}: a "
        f"step is {min(taken):.0f} to {max(taken):.0f} % shorter than under a balance of all modules (means of "
        f"{num_batches} batches, {len(cells)} plans), found in {cpu_s:.2f} s of one core (median)."
    }  # fmt: skip


if __name__ == "__main__":
    main()
