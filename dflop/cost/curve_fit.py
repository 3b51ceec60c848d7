"""A curve through probes: how many knots they justify, where those lie, and how well the result predicts.

Knots lie at quantiles of the probed tokens, so every segment has probes of its own. Segment slopes are non-negative
least-squares coefficients, hence the curve never falls. The number of knots is the smallest whose cross-validated
error is within half a standard error of the best (of paired differences: an outlier spoils every candidate alike), or
within 0.1 %: a knot that earns less than that is not worth reading. On synthetic probes with 1-5 % noise a whole
standard error cost up to 25 % of the accuracy in the tail; half of one costs at most 12 %, and keeps curves short.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop.cost.curve import Floats, evaluate, from_slopes
from dflop.cost.probes import Probes
from dflop.cost.regression import relative_errors, robust_nnls
from dflop.records import CostTerms

MAX_KNOTS = 4
MIN_GAIN_FRAC = 1e-3
STANDARD_ERRORS = 0.5

Knots = tuple[float, ...]


def fit_terms(probes: Probes, target: npt.ArrayLike, knots: Sequence[float] = ()) -> CostTerms:
    """Terms whose layer curve bends at `knots`, with small relative errors against `target` `[N]`."""
    depth, tokens = probes.num_layers, probes.num_tokens
    ends = (0.0, *knots, np.inf)
    segments = [np.clip(tokens, low, high) - low for low, high in itertools.pairwise(ends)]
    columns = [depth, *(depth * s for s in segments), depth * probes.sum_sq_tokens]
    columns += [np.ones_like(tokens), tokens, probes.num_items]
    fixed, *slopes, per_sq, edge_fixed, edge_token, edge_item = robust_nnls(np.stack(columns, axis=1), target).tolist()
    return from_slopes(slopes, knots, CostTerms(fixed, 0.0, per_sq, edge_fixed, edge_token, edge_item))


def predict(terms: CostTerms, probes: Probes) -> Floats:
    """Cost of each probe at its own depth, `[N]`."""
    layers = evaluate(terms, probes.load, 1, edge=False)
    edge = evaluate(terms, probes.load, 0, edge=True)
    total: Floats = probes.num_layers * layers + edge
    return total


def choose_knots(probes: Probes) -> tuple[Knots, Floats]:
    """Knots of the curves through forward and backward seconds, and the cross-validated errors `[N]` with them.

    The errors are of forward + backward, each probe predicted by a fit without its group. They are those of the
    chosen number of knots, which was chosen on the same folds: optimistic by a fraction of the 0.1 % above.
    """
    choices = candidate_knots(probes.num_tokens)
    errors = [_cross_validated(probes, knots) for knots in choices]
    best = errors[int(np.argmin([e.mean() for e in errors]))]
    for knots, error in zip(choices, errors, strict=True):
        worse = error - best
        standard_error = float(worse.std()) / np.sqrt(len(worse))
        if worse.mean() <= max(STANDARD_ERRORS * standard_error, MIN_GAIN_FRAC):
            return knots, error
    raise AssertionError("the best choice is always within tolerance of itself")


def candidate_knots(num_tokens: Floats) -> list[Knots]:
    """No knot, one knot, ... up to `MAX_KNOTS`, as long as each segment holds two sizes that were probed."""
    sizes = np.unique(num_tokens)
    found: list[Knots] = [()]
    for num_knots in range(1, MAX_KNOTS + 1):
        knots = np.quantile(num_tokens, np.arange(1, num_knots + 1) / (num_knots + 1)).round()
        in_segment = np.bincount(np.searchsorted(knots, sizes, side="left"), minlength=num_knots + 1)
        if len(np.unique(knots)) == num_knots and in_segment.min() >= 2 and len(sizes) >= 3 * (num_knots + 1):
            found.append(tuple(knots.tolist()))
    return found


def _cross_validated(probes: Probes, knots: Knots) -> Floats:
    predicted = np.zeros(len(probes))
    for left_out in probes.folds():
        seen, unseen = probes[~left_out], probes[left_out]
        terms = [fit_terms(seen, target, knots) for target in (seen.forward_s, seen.backward_s)]
        predicted[left_out] = predict(terms[0], unseen) + predict(terms[1], unseen)
    return relative_errors(predicted, probes.seconds)
