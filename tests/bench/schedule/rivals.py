"""Other ways to assign samples to buckets, as their users know them; token caps are not theirs."""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.pack import token_lpt
from tests.bench.command import ORTOOLS

MAX_KK_SAMPLES = 1_024
"""Differencing in Python takes seconds beyond this, and minutes at the largest size."""


def random_assignment(weights_s: Floats, num_tokens: Ints, num_buckets: int) -> Ints:
    """Shuffled, then as many samples in every bucket: what a sampler without any knowledge does."""
    n = len(weights_s)
    bucket = np.empty(n, dtype=np.int64)
    bucket[np.random.default_rng(0).permutation(n)] = np.arange(n) * num_buckets // n
    return bucket


def length_grouped(weights_s: Floats, num_tokens: Ints, num_buckets: int) -> Ints:
    """Samples of similar length side by side, as many in every bucket."""
    n = len(weights_s)
    bucket = np.empty(n, dtype=np.int64)
    bucket[np.argsort(-num_tokens, kind="stable")] = np.arange(n) * num_buckets // n
    return bucket


def lpt_on_tokens(weights_s: Floats, num_tokens: Ints, num_buckets: int) -> Ints:
    """The language model's tokens alone, longest first."""
    return token_lpt(num_tokens, num_buckets)


def karmarkar_karp(weights_s: Floats, num_tokens: Ints, num_buckets: int) -> Ints:
    """Largest differencing over m buckets on the sum of all modules' seconds."""
    return differencing(weights_s.sum(axis=1), num_buckets)


def differencing(cost: Floats, num_buckets: int, *, equal_counts: bool = False) -> Ints:
    """Largest differencing (Karmarkar and Karp) of scalar costs over m buckets.

    Every sample starts as a partition of its own, m groups of which one is loaded; for equal counts m samples of
    similar cost start as one, a sample in each group. The two partitions that spread most become one, the heaviest
    group of the first with the lightest of the second, until one is left.

    Raises:
        ValueError: equal counts of samples that the buckets do not divide.
    """
    if equal_counts and len(cost) % num_buckets:
        raise ValueError(f"{len(cost)} samples do not divide into {num_buckets} buckets of equal counts")
    each = num_buckets if equal_counts else 1
    ascending = np.argsort(cost, kind="stable").tolist() if equal_counts else list(range(len(cost)))
    heap: list[tuple[float, int, Floats, list[list[int]]]] = []
    for first in range(0, len(cost), each):
        members = ascending[first : first + each][::-1]
        sums = np.zeros(num_buckets)
        sums[: len(members)] = cost[members]
        groups = [[i] for i in members] + [[] for _ in range(num_buckets - len(members))]
        heap.append((float(sums[-1] - sums[0]), first, sums, groups))
    heapq.heapify(heap)
    serial = len(cost)
    while len(heap) > 1:
        _, _, a, groups_a = heapq.heappop(heap)
        _, _, b, groups_b = heapq.heappop(heap)
        sums = a + b[::-1]  # a descends, b's order is turned
        groups = [x + y for x, y in zip(groups_a, reversed(groups_b), strict=True)]
        order = np.argsort(-sums, kind="stable")
        sums = sums[order]
        serial += 1
        heapq.heappush(heap, (float(sums[-1] - sums[0]), serial, sums, [groups[k] for k in order]))
    bucket = np.empty(len(cost), dtype=np.int64)
    for b, group in enumerate(heap[0][3]):
        bucket[group] = b
    return bucket


RIVALS: Mapping[str, Callable[[Floats, Ints, int], Ints]] = {
    "random": random_assignment,
    "length grouped": length_grouped,
    "LPT on tokens": lpt_on_tokens,
    "Karmarkar-Karp": karmarkar_karp,
}


def cp_sat(weights_s: Floats, num_buckets: int, limit_s: float, num_workers: int) -> dict[str, Any]:
    """The reference's program in a process of its own, for its solver and cvxpy's do not share one.

    Returns status, bucket and objective_s (None without a solution), build_s, solve_s; where there is no ortools, a
    status of `not installed` alone.
    """
    if not ORTOOLS.is_dir():
        return {"status": "not installed"}
    instance = {"weights_s": weights_s.tolist(), "num_buckets": num_buckets, "limit_s": limit_s}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("cp_sat.py"))],  # pandas would find our `bottleneck`
        input=json.dumps({**instance, "num_workers": num_workers}),
        env=os.environ | {"PYTHONPATH": str(ORTOOLS)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
