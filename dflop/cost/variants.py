"""Tables of a module run another way, from a few probes and the table of the way it was probed thoroughly.

A frozen module and one that recomputes do the same forward pass, and a backward pass made of parts that are known:
gradients of the inputs, gradients of the weights, the forward pass once more. So the base table's curves keep their
shapes and only their weights are fitted, by non-negative least squares on relative errors:

- forward seconds: one factor on the base's forward;
- backward seconds: `a * base backward + b * base forward` (recomputing a trained module: a and b near 1);
- activation bytes: one factor on the layers and one on the edge. Layers that recompute keep their inputs only, which
  are linear in tokens, so theirs is a factor on layers times tokens.

Four probes of at least two sizes determine this. Their errors, too, are cross-validated; the base is taken as given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dflop.cost import curve
from dflop.cost.curve import Floats
from dflop.cost.curve_fit import predict
from dflop.cost.identity import with_table_id
from dflop.cost.probes import Probes, noise_frac, optimizer_s_per_param, probed_range
from dflop.cost.regression import relative_errors, robust_nnls
from dflop.errors import CostError
from dflop.records import TRAINS_ALL, TRAINS_NONE, CostTable, CostTerms, Measurement

MIN_PROBES = 4


def derive_variant(base: CostTable, measurements: Sequence[Measurement]) -> CostTable:
    """Table for the way `measurements` were run, on the shapes of `base`'s curves.

    Args:
        base: Fitted table of the same module, hardware, software, dtype and tp.
        measurements: Probes of one variant.

    Raises:
        CostError: fewer than four probes that fit in memory, or all of one size.
    """
    first, probes = measurements[0], Probes.of(measurements)
    if len(probes) < MIN_PROBES or len(np.unique(probes.num_tokens)) < 2:
        way = " and ".join(
            word for word, is_on in (("frozen", first.is_frozen), ("recomputing", first.recompute)) if is_on
        )
        raise CostError(
            f"{len(probes)} probe(s) of {len(np.unique(probes.num_tokens))} size(s) do not determine the cost of "
            "module "
            f"`{first.module}` when {way or 'trained'}; needed: {MIN_PROBES} of two sizes",
            where=f"tp {first.tp} on {first.hardware}",
        )
    forward, backward = _seconds(base, probes)
    errors = np.zeros(len(probes))
    for left_out in probes.folds():
        unseen = probes[left_out]
        parts = [predict(terms, unseen) for terms in _seconds(base, probes[~left_out])]
        errors[left_out] = relative_errors(parts[0] + parts[1], unseen.seconds)
    min_tokens, max_tokens, max_mean_length = probed_range(measurements)
    return with_table_id(
        dataclasses.replace(
            base,
            forward_s=forward,
            backward_s=backward,
            activation_bytes=_bytes(base, probes, recompute=first.recompute),
            num_measurements=len(probes),
            median_error_frac=float(np.median(errors)),
            p95_error_frac=float(np.quantile(errors, 0.95)),
            trains=TRAINS_NONE if first.is_frozen else TRAINS_ALL,
            recompute=first.recompute,
            min_tokens=min(min_tokens, base.min_tokens),
            max_tokens=max(max_tokens, base.max_tokens),
            max_mean_length=max(max_mean_length, base.max_mean_length),
            noise_frac=noise_frac(measurements),
            optimizer_s_per_param=_optimizer(base, measurements),
        )
    )


def _seconds(base: CostTable, probes: Probes) -> tuple[CostTerms, CostTerms]:
    forward, backward = predict(base.forward_s, probes), predict(base.backward_s, probes)
    (factor,) = robust_nnls(forward[:, None], probes.forward_s).tolist()
    a, b = robust_nnls(np.stack([backward, forward], axis=1), probes.backward_s).tolist()
    return curve.combine([(factor, base.forward_s)]), curve.combine([(a, base.backward_s), (b, base.forward_s)])


def _bytes(base: CostTable, probes: Probes, *, recompute: bool) -> CostTerms:
    kept = base.activation_bytes
    layer = dataclasses.replace(curve.ZERO, layer_per_token=1.0) if recompute else curve.layer_part(kept)
    edge = curve.edge_part(kept)
    columns: list[Floats] = [predict(part, probes) for part in (layer, edge)]
    a, b = robust_nnls(np.stack(columns, axis=1), probes.activation_bytes).tolist()
    return curve.combine([(a, layer), (b, edge)])


def _optimizer(base: CostTable, measurements: Sequence[Measurement]) -> float:
    """Measured here, or the base's: recomputing changes nothing about it, and frozen weights have none."""
    if measurements[0].is_frozen:
        return 0.0
    return optimizer_s_per_param(measurements) or base.optimizer_s_per_param
