"""The balance as an integer program: the oracle of tests, and a refinement of small batches that have time.

Minimise T over assignments of samples to buckets, where no module of any bucket takes longer than T and no bucket
exceeds a token cap. The relaxation is no better than the average, so that branching proves little beyond some tens of
samples; what `pack` finds in a millisecond is then what comes back, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.pack import Packing, bottleneck, pack

INCUMBENT_EVALS = 100_000
REL_GAP = 1e-6
"""What counts as no difference between two values of T."""


@dataclass(frozen=True, slots=True)
class ExactPacking(Packing):
    """The best assignment known when the solver stopped."""

    is_optimal: bool
    """No assignment is better by more than `REL_GAP`: the solver says so, or the lower bound is met."""


def exact_pack(
    weights_s: Floats,
    num_tokens: Ints,
    num_buckets: int,
    *,
    cap_tokens: int | Sequence[int],
    deadline_s: float,
    max_nodes: int | None = None,
    incumbent: Packing | None = None,
) -> ExactPacking:
    """Best assignment found in time; never worse than the incumbent.

    A deadline makes the result depend on the machine: training plans its steps without this. With `max_nodes` and a
    deadline that is not reached, it is the same everywhere. The incumbent bounds T from above; the solver cannot be
    started from its assignment, for cvxpy hands HiGHS no solution but that of an earlier run of the same problem.

    Args:
        weights_s: `[N, C]`, as `pack`.
        num_tokens: `[N]` or `[N, K]`, as `pack`.
        num_buckets: As `pack`.
        cap_tokens: As `pack`.
        deadline_s: Seconds of the solver; building the program comes on top.
        max_nodes: Of the branch-and-bound tree; None: as many as there is time for.
        incumbent: An assignment under the caps; None: what `pack` finds.
    """
    best = incumbent or pack(
        weights_s, num_tokens, num_buckets, cap_tokens=cap_tokens, max_evals=INCUMBENT_EVALS, tolerance=0.0
    )
    is_optimal = best.bottleneck_s <= best.lower_bound_s * (1 + REL_GAP)
    if not is_optimal:
        tokens = np.asarray(num_tokens, dtype=np.int64).reshape(len(num_tokens), -1)
        caps = np.atleast_1d(np.asarray(cap_tokens, dtype=np.int64))
        bucket, is_optimal = _solve(weights_s, tokens, caps, num_buckets, best, deadline_s, max_nodes)
        if bucket is not None and (found_s := bottleneck(weights_s, bucket, num_buckets)) < best.bottleneck_s:
            best = Packing(tuple(bucket.tolist()), found_s, best.lower_bound_s, best.num_evals)
    return ExactPacking(best.bucket, best.bottleneck_s, best.lower_bound_s, best.num_evals, is_optimal)


def _solve(
    weights_s: Floats,
    tokens: Ints,
    caps: Ints,
    num_buckets: int,
    best: Packing,
    deadline_s: float,
    max_nodes: int | None,
) -> tuple[Ints | None, bool]:
    """(an assignment under the caps, whether it is proven best); None where the solver ended without one."""
    import cvxpy as cp

    if deadline_s <= 0:
        return None, False
    num_samples = len(weights_s)
    in_bucket = cp.Variable((num_samples, num_buckets), boolean=True)
    longest = cp.Variable()
    # Buckets are alike: the k-th largest sample needs to look at the first k of them only.
    place = np.argsort(np.argsort(-weights_s.max(axis=1), kind="stable"))
    is_spare = (place[:, np.newaxis] < np.arange(num_buckets)).astype(float)
    program = cp.Problem(
        cp.Minimize(longest),
        [
            in_bucket @ np.ones(num_buckets) == 1,
            in_bucket.T @ (weights_s / best.bottleneck_s) <= longest,
            in_bucket.T @ (tokens / np.maximum(caps, 1)) <= (caps > 0).astype(float)[np.newaxis],
            in_bucket <= 1 - is_spare,
            longest >= best.lower_bound_s / best.bottleneck_s,
            longest <= 1.0,
        ],
    )
    options = {"time_limit": deadline_s, "mip_rel_gap": REL_GAP, "threads": 1}
    if max_nodes is not None:
        options["mip_max_nodes"] = max_nodes
    try:
        program.solve(solver=cp.HIGHS, highs_options=options)  # type: ignore[no-untyped-call]  # cvxpy's
    except cp.SolverError:  # the limit came before any solution
        return None, False
    if in_bucket.value is None or not np.isfinite(in_bucket.value).all():
        return None, False
    bucket: Ints = in_bucket.value.argmax(axis=1)
    filled = np.array([np.bincount(bucket, column, num_buckets).max() for column in tokens.T])
    if (filled > caps).any():
        return None, False
    return bucket, program.status == cp.OPTIMAL
