"""Peers that keep the global batch and decide which of its samples share a microbatch: slot and rank of each.

Their media items go to an encoder's ranks by equal counts, as trainers do that do not look at them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.assignment import Assignment, even_item_ranks, in_sequence
from dflop.schedule.items import Ints
from dflop.schedule.linear import sample_weights
from dflop.schedule.pack import pack, token_lpt
from dflop.schedule.policies import StepJob
from tests.bench.peers.packages import batch_rebalance, length_grouped_order, package, random_order
from tests.bench.peers.packing import first_fit_decreasing, fitted_first_fit, verl_microbatches
from tests.bench.schedule.rivals import karmarkar_karp

Place = tuple[Ints, Ints]
"""(slot, rank) of every sample."""
MAX_EVALS = 2_000_000


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


def batchers() -> tuple[Batcher, ...]:
    """All that decide within this process."""
    return (
        Batcher("random", package("torch") + ", RandomSampler", _random),
        Batcher("length-grouped within the batch", package("transformers") + ", LengthGroupedSampler", _grouped),
        Batcher("batch rebalance", package("transformers") + ", BatchRebalanceSampler", _rebalanced),
        Batcher("LPT on tokens", "re-expressed: Graham 1969 on the language model's tokens", _token_lpt),
        Batcher("Karmarkar-Karp, verl", "re-expressed: verl's seqlen_balancing.py at 0db1343", _verl),
        Batcher(
            "Karmarkar-Karp, our seconds", "re-expressed: Karmarkar and Karp 1982 on all modules' seconds", _seconds_kk
        ),
        Batcher("first fit decreasing, fitted", "re-expressed: Johnson 1973, least capacity that is enough", _fitted),
        Batcher(
            "first fit decreasing, memory", "re-expressed: Johnson 1973, bins of the memory's tokens", _first_fit, True
        ),
        Batcher(
            "reference's objective, certified", "re-expressed: DFLOP at 60e86d8, solved by our certified balance", _goal
        ),
    )


def blind_assignment(job: StepJob, place: Place) -> Assignment:
    """Samples as placed, media items cut by count; in an inline plan they are where their sample is."""
    slot, rank = place
    num_slots = job.plan.num_microbatches
    return Assignment(
        slot,
        rank,
        {
            e.module: rank[job.items[e.module].sample_of]
            if job.plan.is_inline
            else even_item_ranks(job.items[e.module], slot, num_slots, e.parallel.dp)
            for e in job.plan.encoders
        },
    )


def buckets_to_place(bucket: Ints, num_ranks: int) -> Place:
    """Buckets of a slot side by side, as the reference numbers them."""
    return bucket // num_ranks, bucket % num_ranks


def weights_of(job: StepJob) -> Floats:
    """`[samples, modules]` predicted seconds."""
    return sample_weights(job.linear)


def _ranks(job: StepJob) -> int:
    return job.plan.module(LLM).parallel.dp


def _tokens(job: StepJob) -> Ints:
    return job.items[LLM].num_tokens


def _random(job: StepJob, seed: int) -> Place:
    return in_sequence(random_order(len(_tokens(job)), seed), job.plan)


def _grouped(job: StepJob, seed: int) -> Place:
    each = max(1, len(_tokens(job)) // job.num_buckets)
    return in_sequence(length_grouped_order(_tokens(job), each, seed), job.plan)


def _rebalanced(job: StepJob, seed: int) -> Place:
    return batch_rebalance(_tokens(job), job.plan.num_microbatches, _ranks(job))


def _token_lpt(job: StepJob, seed: int) -> Place:
    return buckets_to_place(token_lpt(_tokens(job), job.num_buckets), _ranks(job))


def _verl(job: StepJob, seed: int) -> Place:
    return verl_microbatches(_tokens(job), job.plan.num_microbatches, _ranks(job))


def _seconds_kk(job: StepJob, seed: int) -> Place:
    return buckets_to_place(karmarkar_karp(weights_of(job), _tokens(job), job.num_buckets), _ranks(job))


def _fitted(job: StepJob, seed: int) -> Place:
    return buckets_to_place(fitted_first_fit(_tokens(job), job.num_buckets), _ranks(job))


def _first_fit(job: StepJob, seed: int) -> Place:
    return buckets_to_place(first_fit_decreasing(_tokens(job), job.caps.bucket_tokens), _ranks(job))


def _goal(job: StepJob, seed: int) -> Place:
    found = pack(weights_of(job), _tokens(job), job.num_buckets, cap_tokens=job.caps.bucket_tokens, max_evals=MAX_EVALS)
    return buckets_to_place(np.array(found.bucket, dtype=np.int64), _ranks(job))
