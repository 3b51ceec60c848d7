"""What `CostTerms` mean: evaluation, slopes, and sums and multiples of curves.

One phase of a module costs `layers * layer(tokens, squares) + edge(tokens, items)`. Token-wise matmuls are nearly
linear in tokens, but not quite: small inputs leave a device half empty, large ones fall out of a cache, so a layer's
cost is piecewise linear in tokens. Attention is linear in the sum of squared lengths, and the fixed terms are the
launch overhead that makes many small microbatches expensive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.records import CostTerms

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Load = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike] | npt.NDArray[Any]
"""(num_items, num_tokens, sum_sq_tokens): scalars or arrays that broadcast; one array `[3, ...]` of all."""

ZERO = CostTerms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_LINEAR = [f.name for f in dataclasses.fields(CostTerms) if not f.name.endswith(("knots", "bends"))]


def evaluate(terms: CostTerms, load: Load, num_layers: int | Floats, edge: bool) -> Floats:
    """Cost of `num_layers` layers, plus the edge if `edge`, on each load; no tokens cost nothing."""
    items, tokens, sum_sq = (np.asarray(part, dtype=np.float64) for part in load)
    total = tokens * (num_layers * terms.layer_per_token + edge * terms.edge_per_token)
    total = total + num_layers * terms.layer_per_sq_token * sum_sq
    if edge and terms.edge_per_item:
        total = total + terms.edge_per_item * items
    for knot, bend in zip(terms.layer_knots, terms.layer_bends, strict=True):
        total = total + num_layers * bend * np.minimum(tokens, knot)
    total = total + (num_layers * terms.layer_fixed + edge * terms.edge_fixed)
    # Bends that cancel exactly on paper leave a rounding error, which must not become a negative time.
    return np.where(tokens > 0, np.maximum(total, 0.0), 0.0)


def edge_part(terms: CostTerms) -> CostTerms:
    """What is outside the layers."""
    return dataclasses.replace(
        ZERO, edge_fixed=terms.edge_fixed, edge_per_token=terms.edge_per_token, edge_per_item=terms.edge_per_item
    )


def layer_part(terms: CostTerms) -> CostTerms:
    """What the layers cost."""
    return dataclasses.replace(terms, edge_fixed=0.0, edge_per_token=0.0, edge_per_item=0.0)


def straightened(terms: CostTerms, min_tokens: float, max_tokens: float) -> CostTerms:
    """The curve as a line without fixed terms: what a load adds to a microbatch that exists anyway.

    The slope is the curve's mean slope from `min_tokens` to `max_tokens` (that beyond the last knot where the range is
    unknown), so loads add up exactly, and to the curve itself as well as any line can.
    """
    bends, span = 0.0, max_tokens - min_tokens
    if span > 0:
        bends = sum(
            bend * (min(max_tokens, knot) - min(min_tokens, knot)) / span
            for knot, bend in zip(terms.layer_knots, terms.layer_bends, strict=True)
        )
    slope = max(0.0, terms.layer_per_token + bends)
    return dataclasses.replace(
        terms, layer_fixed=0.0, layer_per_token=slope, edge_fixed=0.0, layer_knots=(), layer_bends=()
    )


def from_slopes(slopes: Sequence[float], knots: Sequence[float], others: CostTerms) -> CostTerms:
    """`others` with a layer curve of `slopes[k]` up to `knots[k]` and `slopes[-1]` beyond, one more than knots."""
    assert len(slopes) == len(knots) + 1, f"{len(slopes)} slopes for {len(knots)} knots"
    changes = [(knot, before - after) for knot, (before, after) in zip(knots, itertools.pairwise(slopes), strict=True)]
    kept = [(knot, bend) for knot, bend in changes if bend]
    return dataclasses.replace(
        others,
        layer_per_token=slopes[-1],
        layer_knots=tuple(float(knot) for knot, _ in kept),
        layer_bends=tuple(float(bend) for _, bend in kept),
    )


def combine(parts: Sequence[tuple[float, CostTerms]], edge_parts: Sequence[float] | None = None) -> CostTerms:
    """Sum of multiples of curves; `edge_parts` are the factors of the edge terms where they differ."""
    factors = [factor for factor, _ in parts]
    edges = factors if edge_parts is None else edge_parts
    bends: dict[float, float] = {}
    for factor, terms in parts:
        for knot, bend in zip(terms.layer_knots, terms.layer_bends, strict=True):
            bends[knot] = bends.get(knot, 0.0) + factor * bend
    knots = tuple(sorted(knot for knot, bend in bends.items() if bend))

    def total(name: str) -> float:
        scales = edges if name.startswith("edge") else factors
        return float(sum(scale * getattr(terms, name) for scale, (_, terms) in zip(scales, parts, strict=True)))

    linear: dict[str, Any] = {name: total(name) for name in _LINEAR}
    return CostTerms(**linear, layer_knots=knots, layer_bends=tuple(bends[knot] for knot in knots))
