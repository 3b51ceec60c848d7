"""Simulated seconds of a step under each policy, what deciding them costs, and what cost noise leaves of the gain.

Everything is simulated, on data-sheet costs. The yardstick is the certified balance under the same caps: on loads that
a bench step can balance, its worst bucket is within 0.1 % of the lower bound or the search for better ones was long.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflop.schedule.assignment import Assignment
from dflop.schedule.linear import sample_weights
from dflop.schedule.pack import bottleneck, lower_bound
from dflop.schedule.policies import THOROUGH, Effort, StepJob
from dflop.schedule.warm import warm
from tests.bench.figures import conclude
from tests.bench.schedule.instances import BenchStep, bench_step

CELLS = (
    # samples, microbatches, ranks, encoder pp, LLM pp, encoder dp
    (256, 16, 4, 2, 2, 4),
    (512, 8, 8, 1, 4, 8),
    (1024, 16, 8, 2, 6, 8),
)
RIVALS = ("arrival", "length_grouped", "token_lpt")
EFFORTS = {"full": Effort(), "thorough": THOROUGH}
CERTIFIED = Effort(max_evals=20_000_000)
SIGMAS, NUM_DRAWS = (0.05, 0.1, 0.2), 8
TARGETS = {"full": {"mild": 0.08, "heavy": 0.13}, "thorough": {"mild": 0.10, "heavy": 0.16}}


@dataclass
class Cell:
    """Means over seeds; reductions are of simulated seconds, against the certified balance."""

    name: str
    modules: int
    mixture: str
    num_samples: int
    gap_frac: list[float] = field(default_factory=list)
    """Certified, of the yardstick's worst bucket."""
    reduction: dict[str, list[float]] = field(default_factory=dict)
    """By policy or effort; negative: slower than the yardstick."""
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    wall_ms: dict[str, list[float]] = field(default_factory=dict)
    noisy: dict[str, list[float]] = field(default_factory=dict)
    """By effort and sigma."""
    repeats: bool = True
    """Whether a second search, on two threads, found the very same."""

    def measure(self, step: BenchStep) -> None:
        job = StepJob(step.plan, step.batch, step.cost)
        yardstick = job.assign("bottleneck", CERTIFIED)
        assert job.keeps_caps(yardstick)
        least_s = job.judge.step_s(yardstick)
        weights, bucket = sample_weights(job.linear), yardstick.slot * job.linear.num_ranks + yardstick.rank
        bound = lower_bound(weights, job.num_buckets)
        self.gap_frac.append(bottleneck(weights, bucket, job.num_buckets) / bound - 1)
        for policy in RIVALS:
            self._add(policy, 1 - job.judge.step_s(job.assign(policy, Effort())) / least_s)
        for name, effort in EFFORTS.items():
            found, step_s = self._timed(name, step, effort)
            assert job.keeps_caps(found)
            self._add(name, 1 - step_s / least_s)
            for sigma in SIGMAS:
                ours, theirs = (job.judge.noisy_step_s(a, sigma, NUM_DRAWS) for a in (found, yardstick))
                self.noisy.setdefault(f"{name} {sigma:g}", []).append(1 - ours / theirs)
            if name == "full":
                again = StepJob(step.plan, step.batch, step.cost, num_threads=2).best(effort)[1]
                self.repeats &= bool((again.slot == found.slot).all() and (again.rank == found.rank).all())

    def _timed(self, name: str, step: BenchStep, effort: Effort) -> tuple[Assignment, float]:
        """All that a batch costs, from shapes to the judged assignment."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        _, found, step_s = StepJob(step.plan, step.batch, step.cost).best(effort)
        self.cpu_ms.setdefault(name, []).append(1e3 * (time.thread_time() - cpu_s))
        self.wall_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - wall_s))
        return found, step_s

    def _add(self, name: str, reduction: float) -> None:
        self.reduction.setdefault(name, []).append(reduction)

    @property
    def bounds(self) -> list[tuple[str, bool]]:
        """Names of the targets, and whether each is met."""
        means = {name: statistics.mean(self.reduction[name]) for name in EFFORTS}
        found = [(f"{self.name}: {name}", means[name] >= TARGETS[name][self.mixture]) for name in EFFORTS]
        return [*found, (f"{self.name}: repeated", self.repeats)]

    def line(self) -> str:
        """The means, and whether the targets are met."""
        mean = statistics.mean
        parts = [f"{self.name:38s} gap {max(self.gap_frac):6.2%}"]
        parts += [f"{p} {mean(self.reduction[p]):+.1%}" for p in RIVALS]
        for name in EFFORTS:
            reduction, target = mean(self.reduction[name]), TARGETS[name][self.mixture]
            noise = "/".join(f"{mean(self.noisy[f'{name} {s:g}']):.1%}" for s in SIGMAS)
            verdict = "ok" if reduction >= target else "MISSED"
            cpu = mean(self.cpu_ms[name])
            parts.append(f"{name} {reduction:.1%} {verdict} {cpu:.0f} ms, with noise {noise}")
        return "   ".join(parts) + ("" if self.repeats else "   NOT REPEATED")


def main(sizes: Path | None, seeds: Sequence[int], json_path: Path | None) -> None:
    warm()
    print("simulated seconds of a step, less than the certified balance's under the same caps by")
    print(f"(noise: lognormal, {', '.join(f'{s:.0%}' for s in SIGMAS)} per stage and microbatch, the same for both)")
    cells = []
    for modules in (2, 3, 1):
        for mixture in ("mild", "heavy"):
            for n, m, r, pe, pl, dp in CELLS:
                cell = Cell(f"{modules} modules, {mixture}, {n}/{m}/{r}/{pe}/{pl}/{dp}", modules, mixture, n)
                for seed in seeds:
                    cell.measure(
                        bench_step(
                            modules, mixture, n, num_microbatches=m, num_ranks=r, encoder_pp=pe, llm_pp=pl,
                            encoder_dp=dp, seed=seed, sizes=sizes,
                        )
                    )  # fmt: skip
                    print(f"  {cell.name}, seed {seed}", file=sys.stderr, flush=True)
                cells.append(cell)
                print(cell.line(), flush=True)
    _summary(cells)
    content = {"simulated": True, "real_sizes": sizes is not None, "cells": [vars(c) for c in cells]}
    conclude(content, [bound for c in cells for bound in c.bounds], json_path, "numba", "numpy")


def _summary(cells: Sequence[Cell]) -> None:
    for name, of_mixture in TARGETS.items():
        for mixture, target in of_mixture.items():
            means = [statistics.mean(c.reduction[name]) for c in cells if c.mixture == mixture]
            cpu = np.array(
                [x for c in cells if c.num_samples == max(c.num_samples for c in cells) for x in c.cpu_ms[name]]
            )
            print(
                f"simulated, {name}, {mixture}: {min(means):.1%} to {max(means):.1%} less (target {target:.0%}); "
                f"largest batches {np.median(cpu):.0f} ms of CPU (median), {cpu.max():.0f} (worst)"
            )
