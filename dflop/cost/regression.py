"""Non-negative least squares on relative errors, and the folds that tell how well a fit predicts what it did not see.

Residuals are relative, because a 10 % error on a small microbatch unbalances a pipeline as much as on a large one.
Coefficients are non-negative, so that no prediction falls when a load grows. Timings have outliers (a page fault, a
neighbour on the node): after the first solution the problem is solved twice more with Huber weights, which keep what
lies within 1.345 robust standard deviations and let farther points pull as hard as one at that distance.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from dflop.cost.curve import Bools, Floats

HUBER = 1.345
"""Threshold in standard deviations of residuals: 95 % as efficient as least squares where errors are normal."""
NUM_REWEIGHTINGS = 2
MAX_FOLDS = 8


def robust_nnls(features: Floats, target: npt.ArrayLike) -> Floats:
    """Non-negative `x` with small relative errors of `features @ x` against `target`.

    Args:
        features: `[N, C]`, non-negative.
        target: `[N]`; zeros are asked for like any other value.
    """
    from scipy.optimize import nnls  # here, so that whoever only evaluates costs needs no scipy

    y = np.asarray(target, dtype=np.float64)
    if y.max() <= 0:
        return np.zeros(features.shape[1])
    relative, wanted = features / np.maximum(y, 1e-6 * y.max())[:, None], np.sign(y)
    scale = np.maximum(np.linalg.norm(relative, axis=0), np.finfo(np.float64).tiny)
    columns, weights = relative / scale, np.ones_like(y)
    for repeat in range(NUM_REWEIGHTINGS + 1):
        solution, _ = nnls(columns * weights[:, None], wanted * weights, maxiter=1000)
        error = np.abs(columns @ solution - wanted)
        spread = 1.4826 * float(np.median(error))
        if repeat == NUM_REWEIGHTINGS or error.max() <= HUBER * spread:
            break
        # Never below a millionth: exact data has no spread, and then no point may be called an outlier for rounding.
        weights = np.sqrt(np.minimum(1.0, HUBER * max(spread, 1e-6) / np.maximum(error, 1e-300)))
    found: Floats = solution / scale
    return found


def relative_errors(predicted: npt.ArrayLike, target: npt.ArrayLike) -> Floats:
    """`|predicted / target - 1|`."""
    errors: Floats = np.abs(np.asarray(predicted, dtype=np.float64) / np.asarray(target, dtype=np.float64) - 1.0)
    return errors


def folds(keys: Sequence[Hashable], order: npt.ArrayLike) -> list[Bools]:
    """Masks of what to leave out in turn: at most `MAX_FOLDS`, and rows of one key always together.

    A group of samples timed at two depths is one key: a fit that saw it at one depth has seen it. Keys go round the
    folds in ascending `order`, so that every fold spans the whole range.
    """
    by_size = dict(sorted(zip(keys, np.asarray(order).tolist(), strict=True), key=lambda pair: pair[1]))
    num_folds = min(MAX_FOLDS, len(by_size))
    fold_of = {key: i % num_folds for i, key in enumerate(by_size)}
    chosen = np.array([fold_of[key] for key in keys])
    return [chosen == fold for fold in range(num_folds)]
