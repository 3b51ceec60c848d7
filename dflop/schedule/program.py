"""The balance of all modules as the DFLOP paper finds it: an integer program with a time limit, LPT where that is over.

Minimise T over assignments of samples to buckets, where no module of any bucket takes longer than T and no bucket
exceeds a token cap. For comparison: what is found depends on the machine, and the relaxation is no better than the
average, so that branching proves little beyond some tens of samples.
"""

from __future__ import annotations

import warnings

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep, sample_weights

TIME_LIMIT_S = 5.0
"""Time limit of the solver; building the program comes on top."""
REL_GAP = 1e-6
"""What counts as no difference between two values of T."""


def balance(step: LinearStep, fallback: Ints, time_limit_s: float = TIME_LIMIT_S) -> Ints:
    """Bucket `slot * ranks + rank` of every sample; the fallback where the solver finds nothing better in time.

    Args:
        step: The step.
        fallback: Buckets of every sample, which bound T from above.
        time_limit_s: Of the solver.
    """
    num_buckets = step.num_slots * step.num_ranks
    tokens, caps = [step.tokens], [step.cap_tokens]
    num_parts = np.where(step.on_chain, 1, step.num_ranks)[:, np.newaxis]  # a bucket's share of its slot
    for row, cap in zip(step.media_tokens * num_parts, step.cap_media_tokens.tolist(), strict=True):
        if cap:
            tokens.append(row)
            caps.append(cap)
    if len(step.tokens) < 2 or num_buckets < 2 or time_limit_s <= 0:
        return fallback
    found = solve(sample_weights(step), np.stack(tokens, axis=1), np.array(caps), fallback, num_buckets, time_limit_s)
    return fallback if found is None else found


def bottleneck(weights_s: Floats, bucket: Ints, num_buckets: int) -> float:
    """Load of the worst module of the worst bucket."""
    return max(float(np.bincount(bucket, column, num_buckets).max()) for column in weights_s.T)


def solve(
    weights_s: Floats, tokens: Ints, caps: Ints, fallback: Ints, num_buckets: int, time_limit_s: float
) -> Ints | None:
    """An assignment within the caps that is better than the fallback; None where the solver ended without one.

    Args:
        weights_s: `[N, C]`, seconds sample i brings to module c.
        tokens: `[N, K]`, of each kind that is capped.
        caps: `[K]` of a bucket.
        fallback: `[N]`.
        num_buckets: Microbatches times data-parallel ranks.
        time_limit_s: Of the solver.
    """
    import cvxpy as cp

    longest_s = bottleneck(weights_s, fallback, num_buckets)
    in_bucket, longest = cp.Variable((len(weights_s), num_buckets), boolean=True), cp.Variable()
    # Buckets are alike: the k-th largest sample needs to look at the first k of them only.
    place = np.argsort(np.argsort(-weights_s.max(axis=1), kind="stable"))
    is_spare = (place[:, np.newaxis] < np.arange(num_buckets)).astype(float)
    program = cp.Problem(
        cp.Minimize(longest),
        [
            in_bucket @ np.ones(num_buckets) == 1,
            in_bucket.T @ (weights_s / longest_s) <= longest,
            in_bucket.T @ (tokens / np.maximum(caps, 1)) <= (caps > 0).astype(float)[np.newaxis],
            in_bucket <= 1 - is_spare,
            longest >= weights_s.sum(axis=0).max() / num_buckets / longest_s,
            longest <= 1.0,
        ],
    )
    options = {"time_limit": time_limit_s, "mip_rel_gap": REL_GAP, "threads": 1}
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a stop is no optimum
            program.solve(solver=cp.HIGHS, highs_options=options)  # type: ignore[no-untyped-call]  # cvxpy gives `solve` no types
    except cp.SolverError:  # the limit came before any solution
        return None
    if in_bucket.value is None or not np.isfinite(in_bucket.value).all():
        return None
    bucket: Ints = in_bucket.value.argmax(axis=1)
    filled = np.array([np.bincount(bucket, column, num_buckets).max() for column in tokens.T])
    is_better = bottleneck(weights_s, bucket, num_buckets) < longest_s
    return bucket if is_better and (filled <= caps).all() else None
