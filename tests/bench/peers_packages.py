"""Peers that decide which samples of a global batch share a microbatch: by their own packages, or re-expressed.

Media items go to an encoder's ranks by equal counts, as trainers do that do not look at them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.assignment import in_sequence
from dflop.schedule.items import Ints
from dflop.schedule.linear import sample_weights
from dflop.schedule.pack import pack, token_lpt
from dflop.schedule.policies import StepJob

MAX_EVALS = 2_000_000
VERL_LINEAR = 24_576
"""verl's work of a sequence of s tokens is `24576 s + s^2`: that of layers 4096 wide."""
Place = tuple[Ints, Ints]
"""(slot, rank) of every sample."""


@dataclass(frozen=True)
class Batcher:
    """One peer."""

    name: str
    origin: str
    """Its package with version, or what it is re-expressed from."""
    decide: Callable[[StepJob, int], Place]
    """Job and a seed -> where samples are."""
    counts_itself: bool = False
    """Whether the number of microbatches follows from what it does, and is not given."""


def batchers() -> list[Batcher]:
    """All of them."""
    return [
        Batcher("random", package("torch") + ", RandomSampler", _random),
        Batcher("length-grouped within the batch", package("transformers") + ", LengthGroupedSampler", _grouped),
        Batcher("batch rebalance", package("transformers") + ", BatchRebalanceSampler", _rebalanced),
        Batcher(
            "LPT on tokens", "re-expressed: Graham 1969 on the language model's tokens",
            lambda job, seed: to_place(job, token_lpt(tokens_of(job), job.num_buckets)),
        ),
        Batcher("Karmarkar-Karp, verl", "re-expressed: verl's seqlen_balancing.py at 0db1343", _verl),
        Batcher(
            "Karmarkar-Karp, our seconds", "re-expressed: Karmarkar and Karp 1982 on all modules' seconds",
            lambda job, seed: to_place(job, differencing(sample_weights(job.linear).sum(axis=1), job.num_buckets)),
        ),
        Batcher(
            "first fit decreasing, fitted", "re-expressed: Johnson 1973, least capacity that is enough",
            lambda job, seed: to_place(job, fitted_first_fit(tokens_of(job), job.num_buckets)),
        ),
        Batcher(
            "first fit decreasing, memory", "re-expressed: Johnson 1973, bins of the memory's tokens",
            lambda job, seed: to_place(job, first_fit_decreasing(tokens_of(job), job.caps.bucket_tokens)), True,
        ),
        Batcher(
            "reference's objective, certified", "re-expressed: DFLOP at 60e86d8, solved by our certified balance",
            _certified,
        ),
    ]  # fmt: skip


def package(name: str) -> str:
    """As rows name what they ran."""
    return f"package {name} {version(name)}"


def ranks_of(job: StepJob) -> int:
    return job.plan.module(LLM).parallel.dp


def tokens_of(job: StepJob) -> Ints:
    return job.items[LLM].num_tokens


def to_place(job: StepJob, bucket: Ints) -> Place:
    """Buckets of a slot side by side, as the reference numbers them."""
    return bucket // ranks_of(job), bucket % ranks_of(job)


def _random(job: StepJob, seed: int) -> Place:
    import torch
    from torch.utils.data import RandomSampler

    sampler = RandomSampler(range(len(tokens_of(job))), generator=torch.Generator().manual_seed(seed))
    return in_sequence(np.array(list(sampler), dtype=np.int64), job.plan)


def _grouped(job: StepJob, seed: int) -> Place:
    """transformers' LengthGroupedSampler; it groups what one device gets in one optimizer step."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths, generator = tokens_of(job).tolist(), torch.Generator().manual_seed(seed)
    sampler = LengthGroupedSampler(max(1, len(lengths) // job.num_buckets), lengths=lengths, generator=generator)
    return in_sequence(np.array(list(sampler), dtype=np.int64), job.plan)


def _rebalanced(job: StepJob, seed: int) -> Place:
    """transformers' BatchRebalanceSampler, the global batch kept; every rank works all of it out again."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    lengths, num_slots, num_ranks = tokens_of(job).tolist(), job.plan.num_microbatches, ranks_of(job)
    slot, rank = np.zeros((2, len(lengths)), dtype=np.int64)
    sampler = BatchRebalanceSampler(lengths, len(lengths), num_ranks, num_slots, shuffle=False, drop_last=True)
    for r, microbatches in enumerate(sampler._assign(list(range(len(lengths))), lengths)):
        for k, members in enumerate(microbatches):
            slot[members], rank[members] = k, r
    return slot, rank


def _certified(job: StepJob, seed: int) -> Place:
    weights, cap = sample_weights(job.linear), job.caps.bucket_tokens
    found = pack(weights, tokens_of(job), job.num_buckets, cap_tokens=cap, max_evals=MAX_EVALS)
    return to_place(job, np.array(found.bucket, dtype=np.int64))


def _verl(job: StepJob, seed: int) -> Place:
    """Differencing over ranks, then over a rank's microbatches, small ones at the ends.

    Ranks get equal counts of samples where the batch divides. A rank with fewer samples than microbatches leaves some
    empty, which verl would refuse.
    """
    num_tokens, num_slots, num_ranks = tokens_of(job), job.plan.num_microbatches, ranks_of(job)
    work: Floats = VERL_LINEAR * num_tokens.astype(np.float64) + num_tokens.astype(np.float64) ** 2
    rank = differencing(work, num_ranks, equal_counts=len(work) % num_ranks == 0)
    slot = np.zeros(len(work), dtype=np.int64)
    for r in range(num_ranks):
        mine = np.flatnonzero(rank == r)
        if len(mine):
            bucket = differencing(work[mine], num_slots)
            heaviest_first = np.argsort(-np.bincount(bucket, work[mine], num_slots), kind="stable")
            position = np.empty(num_slots, dtype=np.int64)
            position[np.concatenate([heaviest_first[::2][::-1], heaviest_first[1::2]])] = np.arange(num_slots)
            slot[mine] = position[bucket]
    return slot, rank


def differencing(cost: Floats, num_buckets: int, *, equal_counts: bool = False) -> Ints:
    """Largest differencing (Karmarkar and Karp) of scalar costs over m buckets.

    Every sample starts as a partition, m groups of which one is loaded; for equal counts m samples of similar cost
    start as one, a sample in each group. The two partitions that spread most become one, the heaviest group of the
    first with the lightest of the second, until one is left.
    """
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
        (_, _, a, groups_a), (_, _, b, groups_b) = heapq.heappop(heap), heapq.heappop(heap)
        sums = a + b[::-1]  # a descends, b's order is turned
        groups = [x + y for x, y in zip(groups_a, reversed(groups_b), strict=True)]
        order = np.argsort(-sums, kind="stable")
        serial += 1
        heapq.heappush(heap, (float(sums[order[-1]] - sums[order[0]]), serial, sums[order], [groups[k] for k in order]))
    bucket = np.empty(len(cost), dtype=np.int64)
    for b, group in enumerate(heap[0][3]):
        bucket[group] = b
    return bucket


def first_fit_decreasing(num_tokens: Ints, capacity: int) -> Ints:
    """Bin of every sample, longest first into the first bin with room; bins are numbered as they are opened."""
    assert int(num_tokens.max()) <= capacity, "a sample fits in no bin"
    free, bins = np.full(len(num_tokens), capacity, dtype=np.int64), np.zeros(len(num_tokens), dtype=np.int64)
    for i in np.argsort(-num_tokens, kind="stable").tolist():
        bins[i] = int(np.argmax(free >= num_tokens[i]))
        free[bins[i]] -= num_tokens[i]
    return bins


def fitted_first_fit(num_tokens: Ints, num_bins: int) -> Ints:
    """First fit decreasing with about the least capacity for which so many bins are enough: the search of MULTIFIT."""
    low = max(int(num_tokens.max()), -(-int(num_tokens.sum()) // num_bins))
    high = 2 * low  # every bin but one is then more than half full, and together they hold more than there is
    best = first_fit_decreasing(num_tokens, high)
    while low < high:
        middle = (low + high) // 2
        found = first_fit_decreasing(num_tokens, middle)
        if int(found.max()) < num_bins:
            best, high = found, middle
        else:
            low = middle + 1
    return best
