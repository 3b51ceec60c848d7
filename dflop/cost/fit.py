"""Cost tables from probes.

Probes are shallow, 1 and 2 layers deep; the difference between depths is the cost of a layer, the rest is the edge
(embeddings, projector, head). Probe sets should mix lengths (random, length-sorted, tile-sorted): collinear sets took
the error from 1.0-1.6 % to 3.4 % on a CPU testbed. How a curve is fitted is in `curve_fit.py` and `regression.py`.

A table holds for one way of running a module. The way with the table that others lean on is the trained one, without
recomputation, or the nearest to it that was probed; other ways with fewer than 12 probes are derived from it
(`variants.py`). Groups that ran out of memory count for the range of a table only.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from dflop.cost.curve_fit import choose_knots, fit_terms
from dflop.cost.identity import with_table_id
from dflop.cost.probes import OOM, Probes, noise_frac, optimizer_s_per_param, param_bytes, probed_range
from dflop.cost.variants import MIN_PROBES, derive_variant
from dflop.errors import CostError, did_you_mean
from dflop.records import TRAINS_ALL, TRAINS_NONE, CostTable, Measurement, ModuleSpec

NUM_TERMS = 6
MIN_OWN_PROBES = 2 * NUM_TERMS
"""A variant with fewer probes is derived instead of fitted."""

Identity = tuple[str, str, str, str, str, int]
Way = tuple[bool, bool]
"""(recompute, is_frozen)."""


def fit_cost_tables(measurements: Sequence[Measurement], specs: Sequence[ModuleSpec]) -> list[CostTable]:
    """One cost table per (profile, module, hardware, software, dtype, tp, frozen, recompute) in `measurements`.

    Args:
        measurements: Probes in any order; per table at least 6, over two depths and two sizes, or 4 for a variant of
            a table.
        specs: Modules of the model; each must have been measured.

    Raises:
        CostError: a module without probes, an unknown module, or probes that do not determine a table.
    """
    depth = {spec.module: spec.num_layers for spec in specs}
    measured = {m.module for m in measurements}
    for module in sorted(measured - depth.keys()):
        raise CostError(f"measurements of unknown module `{module}`", hint=did_you_mean(module, depth))
    for module in sorted(depth.keys() - measured):
        raise CostError(f"no measurement of module `{module}`", hint=f"measured: {', '.join(sorted(measured)) or '-'}")
    ordered = sorted(measurements, key=lambda m: (_identity(m), _way(m), m.num_layers, m.num_tokens, m.sum_sq_tokens))
    groups = itertools.groupby(ordered, key=_identity)
    return [table for key, probes in groups for table in _tables(list(probes), depth[key[1]])]


def missing_probes(measurements: Sequence[Measurement], ways: Collection[Way]) -> str:
    """What is needed beside the probes of one module at one tp for tables of all ways; empty if nothing is.

    Args:
        measurements: Of the module at that tp.
        ways: (recompute, is_frozen) of each.
    """
    timed: dict[Way, list[Measurement]] = {way: [] for way in ways}
    for m in measurements:
        if m.status != OOM and _way(m) in timed:
            timed[_way(m)].append(m)
    first, *others = sorted(timed)
    missing = _missing(timed[first])
    for way in others:
        if len(timed[way]) < MIN_PROBES or len({m.num_tokens for m in timed[way]}) < 2:
            missing.append(f"{MIN_PROBES} probes of two sizes of each other mode")
            break
    return "; ".join(missing)


def _identity(m: Measurement) -> Identity:
    return (m.profile_key, m.module, m.hardware, m.software, m.dtype, m.tp)


def _way(m: Measurement) -> Way:
    return (m.recompute, m.is_frozen)


def _tables(probes: list[Measurement], num_layers: int) -> Iterator[CostTable]:
    """The table of the first way of running, then those of the others."""
    ways = [list(group) for _, group in itertools.groupby(probes, key=_way)]
    base = _fit(ways[0], num_layers)
    yield base
    for way in ways[1:]:
        timed = [m for m in way if m.status != OOM]
        if len(timed) >= MIN_OWN_PROBES and not _missing(timed):
            yield _fit(way, num_layers)
        else:
            yield derive_variant(base, way)


def _fit(measurements: list[Measurement], num_layers: int) -> CostTable:
    timed = [m for m in measurements if m.status != OOM]
    _check(measurements[0], timed, num_too_large=len(measurements) - len(timed))
    first, probes = timed[0], Probes.of(timed)
    knots, errors = choose_knots(probes)
    layer_param_bytes, edge_param_bytes = param_bytes(timed)
    min_tokens, max_tokens, max_mean_length = probed_range(measurements)
    return with_table_id(
        CostTable(
            table_id="",
            profile_key=first.profile_key,
            module=first.module,
            hardware=first.hardware,
            software=first.software,
            dtype=first.dtype,
            tp=first.tp,
            source="measured",
            num_layers=num_layers,
            forward_s=fit_terms(probes, probes.forward_s, knots),
            backward_s=fit_terms(probes, probes.backward_s, knots),
            activation_bytes=fit_terms(probes, probes.activation_bytes),
            layer_param_bytes=layer_param_bytes,
            edge_param_bytes=edge_param_bytes,
            num_measurements=len(probes),
            median_error_frac=float(np.median(errors)),
            p95_error_frac=float(np.quantile(errors, 0.95)),
            trains=TRAINS_NONE if first.is_frozen else TRAINS_ALL,
            recompute=first.recompute,
            fp8=first.fp8,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            max_mean_length=max_mean_length,
            noise_frac=noise_frac(timed),
            optimizer_s_per_param=optimizer_s_per_param(timed),
        )
    )


def _check(first: Measurement, timed: list[Measurement], *, num_too_large: int) -> None:
    """Refuse probes that cannot tell layers from edge or fixed cost from size.

    Squared lengths or items proportional to tokens are accepted: then every microbatch has that proportion too
    (an audio encoder with fixed windows), and any split of the cost between the two predicts the same.
    """
    where = f"module `{first.module}` at tp {first.tp} on {first.hardware}"
    if timed and min(min(p.forward_s, p.num_tokens) for p in timed) <= 0:
        raise CostError("a probe has no tokens or no forward time", where=where)
    if missing := _missing(timed):
        raise CostError(
            f"probes do not determine a cost table; needed: {'; '.join(missing)}",
            where=where,
            hint=(
                f"{num_too_large} probes ran out of memory: use a device with more memory, fewer "
                "`model_profile.num_layers`, smaller media limits or a higher tp"
                if num_too_large
                else "the next run adds probes; allow more time: model_profile.budget_s"
            ),
        )


def _missing(timed: list[Measurement]) -> list[str]:
    """What is needed beside these probes."""
    depths = sorted({p.num_layers for p in timed})
    sizes = sorted({p.num_tokens for p in timed})
    missing = []
    if len(depths) < 2:
        missing.append(f"two depths (have {depths})")
    if len(sizes) < 2:
        missing.append(f"two token counts (have {sizes})")
    if len(timed) < NUM_TERMS:
        missing.append(f"{NUM_TERMS} probes (have {len(timed)})")
    if missing:
        return missing
    essential = np.array([(p.num_layers, p.num_layers * p.num_tokens, 1, p.num_tokens) for p in timed], dtype=float)
    if np.linalg.matrix_rank(essential / essential.max(axis=0)) < essential.shape[1]:
        missing.append("each depth probed at two token counts (depth and size vary together)")
    return missing
