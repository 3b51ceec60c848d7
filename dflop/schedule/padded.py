"""Data parallelism with a collator that pads: samples of similar length share a microbatch.

There, a sample costs what the longest one of its microbatch costs, so costs do not add up and sums cannot be balanced
sample by sample. Sorted by length, the samples are cut into as many runs as there are microbatches: few long samples,
many short ones. Which runs make the dearest one cheapest is exact, a binary search over its cost; runs of similar cost
are then dealt out to the ranks. Equal counts in arrival order stay where they are better.
"""

from __future__ import annotations

import numpy as np

from dflop.cost.model import Floats
from dflop.errors import ConfigError
from dflop.schedule.data_parallel import RankPlan, Sync
from dflop.schedule.items import Ints


def balance_padded(
    seconds_s: Floats,
    num_tokens: Ints,
    num_ranks: int,
    *,
    cap_tokens: int | None = None,
    fixed_s: float = 0.0,
    num_microbatches: int | None = None,
    sync: Sync = "step",
) -> RankPlan:
    """Ranks and microbatches for the samples of one global batch whose microbatches are padded.

    Args:
        seconds_s: `[samples]` that each costs by itself.
        num_tokens: `[samples]`.
        num_ranks: Data-parallel ranks.
        cap_tokens: That no microbatch may exceed, padding included, unless it is a single sample; None: no limit.
        fixed_s: Every microbatch costs that much more.
        num_microbatches: Per rank; None: as few as the cap allows.
        sync: As in `balance_ranks`.

    Raises:
        ConfigError: fewer samples than microbatches, or they do not fit into so many.
    """
    order = np.lexsort((np.arange(len(num_tokens)), -seconds_s, -num_tokens))
    dearest = np.maximum.accumulate(seconds_s[order][::-1])[::-1]  # of a run that begins here: it has what follows
    cap = int(cap_tokens or num_tokens.sum() * len(num_tokens) + 1)
    num_slots, counts = num_microbatches or 1, None
    while counts is None and num_ranks * num_slots <= len(order):
        counts = _runs(dearest, num_tokens[order], num_ranks * num_slots, cap)
        if counts is None and num_microbatches is None:
            num_slots += 1
        elif counts is None:
            break
    if counts is None and num_microbatches is None:  # one sample each, and for some ranks none in the last one
        num_slots, counts = -(-len(order) // num_ranks), [1] * len(order)
    if counts is None:
        raise ConfigError(
            f"{len(order)} samples do not fit into {num_slots} microbatch(es) of {cap} padded tokens on {num_ranks} "
            "rank(s), one sample each at least",
            hint="raise the cap, or use a larger global batch",
        )
    runs = np.empty(len(order), dtype=np.int64)
    runs[order] = np.repeat(np.arange(len(counts)), counts)
    sorted_runs = _by_cost(seconds_s, runs, len(counts))
    slot, position = sorted_runs // num_ranks, sorted_runs % num_ranks
    is_turned = (slot % 2 == 1) & (sync == "step")  # there and back: sums of ranks stay close
    rank = np.where(is_turned, num_ranks - 1 - position, position)
    found = [(slot, rank)]
    arrival = np.arange(len(order)) * num_ranks * num_slots // len(order)
    if _fits(num_tokens, arrival, cap):
        found.append((arrival // num_ranks, arrival % num_ranks))
    costs = [padded_step_s(seconds_s, s, r, num_ranks, num_slots, fixed_s, sync) for s, r in found]
    best = int(np.argmin(costs))
    bound = max(seconds_s.sum() / num_ranks, seconds_s.max(initial=0.0)) + fixed_s * num_slots
    return RankPlan(
        rank=found[best][1],
        slot=found[best][0],
        num_microbatches=num_slots,
        step_s=costs[best],
        lower_bound_s=min(costs[best], float(bound)),
        num_over_cap=int((num_tokens > cap).sum()),
    )


def padded_step_s(
    seconds_s: Floats, slot: Ints, rank: Ints, num_ranks: int, num_slots: int, fixed_s: float, sync: Sync
) -> float:
    """Predicted seconds of a step whose samples each cost what the dearest of their microbatch costs."""
    bucket = slot * num_ranks + rank
    dearest = np.zeros(num_ranks * num_slots)
    np.maximum.at(dearest, bucket, seconds_s)
    counts = np.bincount(bucket, minlength=len(dearest))
    load = (dearest * counts + fixed_s * (counts > 0)).reshape(num_slots, num_ranks)
    return float(load.sum(axis=0).max() if sync == "step" else load.max(axis=1).sum())


def _runs(dearest: Floats, tokens: Ints, num_runs: int, cap: int) -> list[int] | None:
    """Samples per run, with the dearest run as cheap as can be; None: they do not fit.

    Args:
        dearest: `[samples]` seconds of each sample of a run that begins here.
        tokens: `[samples]`, longest first.
        num_runs: None of them may be empty.
        cap: Tokens of a run, padding included.
    """
    most = [max(1, cap // max(1, int(t))) for t in tokens]

    def cut(limit_s: float) -> list[int] | None:
        counts, first = [], 0
        for left in range(num_runs - 1, -1, -1):
            # Rounded up by what dividing may lose: n times x, by x, can come out below n.
            affordable = int(limit_s / dearest[first] * (1 + 1e-12)) if dearest[first] > 0 else len(tokens)
            counts.append(max(1, min(most[first], affordable, len(tokens) - left - first)))
            if counts[-1] * dearest[first] > limit_s * (1 + 1e-12):
                return None
            first += counts[-1]
        return counts if first == len(tokens) else None

    low, high = 0.0, float(dearest[0]) * len(tokens)
    best = cut(high)
    for _ in range(50 if best else 0):
        middle = (low + high) / 2
        found = cut(middle)
        low, high, best = (low, middle, found) if found else (middle, high, best)
    return best


def _by_cost(seconds_s: Floats, runs: Ints, num_runs: int) -> Ints:
    """Per sample, the position of its run when the dearest runs come first."""
    dearest = np.zeros(num_runs)
    np.maximum.at(dearest, runs, seconds_s)
    position = np.empty(num_runs, dtype=np.int64)
    position[np.argsort(-dearest * np.bincount(runs, minlength=num_runs), kind="stable")] = np.arange(num_runs)
    found: Ints = position[runs]
    return found


def _fits(num_tokens: Ints, bucket: Ints, cap: int) -> bool:
    longest = np.zeros(int(bucket.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, bucket, num_tokens)
    counts = np.bincount(bucket)
    return bool(((longest * counts <= cap) | (counts == 1)).all())
