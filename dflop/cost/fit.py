"""Cost tables from probes, by non-negative least squares on relative errors.

Probes are shallow, 1 and 2 layers deep; the difference between depths is the cost of a layer, the rest is the edge
(embeddings, projector, head). Residuals are weighted by 1/y, because a 10 % error on a small microbatch unbalances a
pipeline as much as on a large one, and coefficients are kept non-negative, so that a prediction can never fall when
a microbatch grows. Probe sets should mix lengths (random, length-sorted, tile-sorted): collinear sets took the error
from 1.0-1.6 % to 3.4 % on a CPU testbed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from dflop.cost.model import CostModel, Floats
from dflop.errors import CostError, did_you_mean
from dflop.records import CostTable, CostTerms, Measurement, ModuleSpec, to_dict

NUM_TERMS = 6


def fit_cost_tables(
    measurements: Sequence[Measurement], specs: Sequence[ModuleSpec], source: str = "measured"
) -> list[CostTable]:
    """One cost table per (profile, module, hardware, software, dtype, tp) found in `measurements`.

    Args:
        measurements: Probes in any order; per table at least 6, over two depths and two sizes.
        specs: Modules of the model; each must have been measured.
        source: `measured` or `analytic`, kept in the table.

    Raises:
        CostError: a module without probes, an unknown module, or probes that do not determine a table.
    """
    depth = {spec.module: spec.num_layers for spec in specs}
    measured = {m.module for m in measurements}
    for module in sorted(measured - depth.keys()):
        raise CostError(f"measurements of unknown module `{module}`", hint=did_you_mean(module, depth))
    for module in sorted(depth.keys() - measured):
        raise CostError(f"no measurement of module `{module}`", hint=f"measured: {', '.join(sorted(measured)) or '-'}")
    ordered = sorted(measurements, key=lambda m: (_identity(m), m.num_layers, m.num_tokens, m.sum_sq_tokens))
    groups = itertools.groupby(ordered, key=_identity)
    return [_fit(list(probes), depth[key[1]], source) for key, probes in groups]


def _identity(m: Measurement) -> tuple[str, str, str, str, str, int]:
    return (m.profile_key, m.module, m.hardware, m.software, m.dtype, m.tp)


def _fit(probes: list[Measurement], num_layers: int, source: str) -> CostTable:
    features = np.array([_features(p) for p in probes], dtype=np.float64)
    _check(probes, features)
    first = probes[0]
    layer_param_bytes, edge_param_bytes = _param_bytes(probes)
    table = CostTable(
        table_id="",
        profile_key=first.profile_key,
        module=first.module,
        hardware=first.hardware,
        software=first.software,
        dtype=first.dtype,
        tp=first.tp,
        source=source,
        num_layers=num_layers,
        forward_s=_terms(features, [p.forward_s for p in probes]),
        backward_s=_terms(features, [p.backward_s for p in probes]),
        activation_bytes=_terms(features, [p.activation_bytes for p in probes]),
        layer_param_bytes=layer_param_bytes,
        edge_param_bytes=edge_param_bytes,
        num_measurements=len(probes),
        median_error_frac=0.0,
        p95_error_frac=0.0,
    )
    error_frac = _errors(table, probes)
    table = dataclasses.replace(
        table,
        median_error_frac=float(np.median(error_frac)),
        p95_error_frac=float(np.quantile(error_frac, 0.95)),
    )
    content = json.dumps(to_dict(table), sort_keys=True)
    return dataclasses.replace(table, table_id=hashlib.sha256(content.encode()).hexdigest()[:16])


def _features(p: Measurement) -> tuple[int, ...]:
    """Design-matrix row in the order of the fields of `CostTerms`."""
    return (p.num_layers, p.num_layers * p.num_tokens, p.num_layers * p.sum_sq_tokens, 1, p.num_tokens, p.num_items)


def _check(probes: list[Measurement], features: Floats) -> None:
    """Refuse probes that cannot tell layers from edge or fixed cost from size.

    Squared lengths or items proportional to tokens are accepted: then every microbatch has that proportion too
    (an audio encoder with fixed windows), and any split of the cost between the two predicts the same.
    """
    depths = sorted({p.num_layers for p in probes})
    sizes = sorted({p.num_tokens for p in probes})
    where = f"module `{probes[0].module}` at tp {probes[0].tp} on {probes[0].hardware}"
    if min(min(p.forward_s, p.num_tokens) for p in probes) <= 0:
        raise CostError("a probe has no tokens or no forward time", where=where)
    missing = []
    if len(depths) < 2:
        missing.append(f"two depths (have {depths})")
    if len(sizes) < 2:
        missing.append(f"two token counts (have {sizes})")
    if len(probes) < NUM_TERMS:
        missing.append(f"{NUM_TERMS} probes (have {len(probes)})")
    essential = features[:, [0, 1, 3, 4]]
    if not missing and np.linalg.matrix_rank(essential / essential.max(axis=0)) < essential.shape[1]:
        missing.append("each depth probed at two token counts (depth and size vary together)")
    if missing:
        raise CostError(
            f"probes do not determine a cost table; needed: {'; '.join(missing)}",
            where=where,
            hint="probe 1 and 2 layers on the same groups of samples of different sizes",
        )


def _terms(features: Floats, target: Sequence[float]) -> CostTerms:
    y = np.asarray(target, dtype=np.float64)
    if y.max() <= 0:
        return CostTerms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    weighted = features / np.maximum(y, 1e-6 * y.max())[:, None]
    scale = np.maximum(np.linalg.norm(weighted, axis=0), np.finfo(np.float64).tiny)
    solution, _ = nnls(weighted / scale, np.sign(y), maxiter=1000)
    fixed, per_token, per_sq_token, edge_fixed, edge_per_token, edge_per_item = (float(c) for c in solution / scale)
    return CostTerms(fixed, per_token, per_sq_token, edge_fixed, edge_per_token, edge_per_item)


def _param_bytes(probes: list[Measurement]) -> tuple[int, int]:
    """Exact (layer, edge) parameter bytes: parameters are linear in depth."""
    by_depth: dict[int, int] = {p.num_layers: p.param_bytes for p in probes}
    low, high = min(by_depth), max(by_depth)
    layer = (by_depth[high] - by_depth[low]) // (high - low)
    return layer, by_depth[low] - layer * low


def _errors(table: CostTable, probes: list[Measurement]) -> Floats:
    """Relative errors of forward + backward on the probes themselves, each at its own depth."""
    model = CostModel([table])
    error_frac = []
    for p in probes:
        forward_s, backward_s = model.module_seconds(
            p.module, p.num_items, p.num_tokens, p.sum_sq_tokens, num_layers=p.num_layers, edge=True, tp=p.tp
        )
        error_frac.append(abs(float(forward_s + backward_s) / (p.forward_s + p.backward_s) - 1.0))
    return np.array(error_frac)
