"""How evenly buckets are filled, how surely, and how fast: certified balance beside what others do.

A gap is how far the slowest module of the slowest bucket is above what no assignment can stay below. Times are CPU
milliseconds of one thread, bound included, compiled and warm, with the wall's beside them; rivals run on the same
instances in the same run, without token caps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.caps import plan_caps
from dflop.schedule.items import Ints, module_items
from dflop.schedule.linear import linear_step, sample_weights
from dflop.schedule.pack import bottleneck, pack, token_cap
from dflop.simulate.jit import IS_COMPILED
from tests.bench.figures import conclude
from tests.bench.schedule.instances import bench_step
from tests.bench.schedule.rivals import MAX_KK_SAMPLES, RIVALS, cp_sat

SIZES = ((64, 8), (256, 32), (1024, 64), (1024, 128), (1024, 256), (4096, 256), (16384, 1024))
"""Samples, buckets."""
CPU_BOUND_MS = {1024: 10.0, 16384: 150.0}
TYPICAL_GAP_FRAC, LARGEST_GAP_FRAC = 1e-3, 1e-2
NUM_RANKS = 4
MAX_EVALS = 1_000_000
NUMPY_EVALS = 20_000
NUM_REPEATS = 5
CP_SAT_CELLS = ((64, 8), (256, 32), (1024, 64))
CP_SAT_LIMIT_S = 10.0
CP_SAT_WORKERS = 2
ROUNDING = 1e-9


@dataclass
class Cell:
    """One size, number of modules and mixture, over all seeds."""

    num_samples: int
    num_buckets: int
    modules: int
    mixture: str
    gap_frac: list[float] = field(default_factory=list)
    num_evals: list[int] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Seeds times repeats."""
    wall_ms: list[float] = field(default_factory=list)
    rivals: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By name: gap_frac and ms, per seed."""
    cp_sat: dict[str, Any] | None = None

    @property
    def missed(self) -> list[str]:
        found = []
        if max(self.gap_frac) > LARGEST_GAP_FRAC:
            found.append(f"gap {max(self.gap_frac):.2%}")
        bound_ms = CPU_BOUND_MS.get(self.num_samples)
        if bound_ms and max(self.cpu_ms) > bound_ms:
            found.append(f"{max(self.cpu_ms):.1f} ms")
        return found

    @property
    def name(self) -> str:
        return f"{self.num_samples:5d} x {self.num_buckets:4d} {self.modules} {self.mixture:5s}"

    def line(self) -> str:
        times = f"{np.median(self.cpu_ms):6.2f} {np.percentile(self.cpu_ms, 95):6.2f} {max(self.cpu_ms):6.2f} ms"
        gaps = f"{statistics.median(self.gap_frac):6.3%} {max(self.gap_frac):7.3%}"
        others = "  ".join(
            f"{name} {statistics.median(r['gap_frac']):.2%} {statistics.median(r['ms']):.3g} ms"
            for name, r in self.rivals.items()
        )
        if self.cp_sat:
            others += f"  CP-SAT {_cp_sat_text(self.cp_sat)}"
        return f"{self.name}  {gaps}  {times}  {'MISSED' if self.missed else 'ok':6s}  {others}"


def main(sizes: Path | None, seeds: Sequence[int], json_path: Path | None) -> None:
    print("samples x buckets, modules, mixture; gap median, largest; CPU median, p95, largest; rivals: gap, time")
    cells = []
    for num_samples, num_buckets in SIZES:
        for modules in (1, 2, 3):
            for mixture in ("mild", "heavy"):
                cells.append(_run(Cell(num_samples, num_buckets, modules, mixture), seeds, sizes))
                print(cells[-1].line(), flush=True)
    typical = statistics.median(gap for cell in cells for gap in cell.gap_frac)
    bounds = [(f"{' '.join(cell.name.split())}: {', '.join(cell.missed) or 'ok'}", not cell.missed) for cell in cells]
    bounds.append((f"typical gap {typical:.3%}", typical <= TYPICAL_GAP_FRAC * (1 + ROUNDING)))
    closed = sum(gap <= TYPICAL_GAP_FRAC * (1 + ROUNDING) for cell in cells for gap in cell.gap_frac)
    total = sum(len(cell.gap_frac) for cell in cells)
    print(f"{closed} of {total} instances within {TYPICAL_GAP_FRAC:.1%}, median gap {typical:.3%}")
    content = {
        "sizes": "real" if sizes else "generated",
        "seeds": list(seeds),
        "cells": [asdict(cell) | {"missed": cell.missed} for cell in cells],
        "median_gap_frac": typical,
        "num_closed": closed,
        "num_instances": total,
    }
    conclude(content, bounds, json_path, "numpy", "numba")


def _run(cell: Cell, seeds: Sequence[int], sizes: Path | None) -> Cell:
    for seed in seeds:
        weights, tokens = _instance(cell, seed, sizes)
        cap = token_cap(tokens, cell.num_buckets)
        keys = {"cap_tokens": cap, "max_evals": MAX_EVALS}
        packing = pack(weights, tokens, cell.num_buckets, **keys)  # warms the kernels, too
        for _ in range(NUM_REPEATS):
            wall, cpu = time.perf_counter(), time.thread_time()
            packing = pack(weights, tokens, cell.num_buckets, **keys)
            cell.cpu_ms.append(1e3 * (time.thread_time() - cpu))
            cell.wall_ms.append(1e3 * (time.perf_counter() - wall))
        cell.num_evals.append(packing.num_evals)
        bound_s = packing.lower_bound_s
        cell.gap_frac.append(max(0.0, packing.bottleneck_s / bound_s - 1))
        for name, rival in RIVALS.items():
            if (
                name == "Karmarkar-Karp"
                and len(weights) >= MAX_KK_SAMPLES
                and (seed != seeds[0] or len(weights) > MAX_KK_SAMPLES)
            ):
                continue
            cpu = time.thread_time()
            bucket = rival(weights, tokens, cell.num_buckets)
            _note(
                cell,
                name,
                1e3 * (time.thread_time() - cpu),
                bottleneck(weights, bucket, cell.num_buckets) / bound_s - 1,
            )
        if cell.num_samples == 1024:
            cpu = time.thread_time()
            plain = pack(weights, tokens, cell.num_buckets, cap_tokens=cap, max_evals=NUMPY_EVALS, compiled=False)
            _note(cell, "ours in numpy", 1e3 * (time.thread_time() - cpu), plain.bottleneck_s / bound_s - 1)
        if seed == seeds[0] and (cell.num_samples, cell.num_buckets) in CP_SAT_CELLS:
            print(f"CP-SAT on {cell.name}", file=sys.stderr, flush=True)
            found = cp_sat(weights, cell.num_buckets, CP_SAT_LIMIT_S, CP_SAT_WORKERS) | {"lower_bound_s": bound_s}
            cell.cp_sat = {name: value for name, value in found.items() if name != "bucket"}
    return cell


def _note(cell: Cell, name: str, ms: float, gap_frac: float) -> None:
    row = cell.rivals.setdefault(name, {"gap_frac": [], "ms": []})
    row["gap_frac"].append(gap_frac)
    row["ms"].append(ms)


def _cp_sat_text(found: dict[str, Any]) -> str:
    if "build_s" not in found:
        return str(found["status"])
    objective_s = found["objective_s"]
    gap = "-" if objective_s is None else f"{objective_s / found['lower_bound_s'] - 1:.2%}"
    return f"{found['status']} {gap} {found['build_s']:.1f}+{found['solve_s']:.1f} s"


def _instance(cell: Cell, seed: int, sizes: Path | None) -> tuple[Floats, Ints]:
    """(seconds by sample and module, tokens of the language model)."""
    step = bench_step(
        cell.modules, cell.mixture, cell.num_samples, num_microbatches=cell.num_buckets // NUM_RANKS,
        num_ranks=NUM_RANKS, seed=seed, sizes=sizes,
    )  # fmt: skip
    items = {m.module: module_items(step.batch, m.module) for m in step.plan.modules}
    caps = plan_caps(step.plan, items, compiled=IS_COMPILED)
    return sample_weights(linear_step(step.plan, items, step.cost.extrapolating(), caps)), items[LLM].num_tokens
