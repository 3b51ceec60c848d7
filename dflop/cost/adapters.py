"""Cost of a module whose low-rank adapters train in place of its weights, from tables of the trained and frozen module.

Forward and backward are those of a frozen LLM, whose backward pass makes the gradients of inputs alone, and what the
adapters add: as much as their share of the parameters, once forward and twice backward. A frozen encoder is measured
without a backward pass, so of an encoder, or without a table of the frozen LLM, the backward pass is that of the
trained module, an upper bound. A layer keeps what a trained one keeps, but for inputs of Linears without adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dflop.cost import curve
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.tensor_parallel import DERIVED
from dflop.records import LLM, TRAINS_ADAPTERS, TRAINS_ALL, TRAINS_NONE, CostTable, CostTerms, ModuleSpec


def adapter_table(trained: CostTable, plain: Mapping[str, CostTable], spec: ModuleSpec) -> CostTable:
    """Table of a module of which adapters train, marked `derived`.

    Args:
        trained: Of the module when all of it trains, recomputing or not.
        plain: Tables of the same degree that do not recompute, by what trains.
        spec: Of the module, with its adapters.
    """
    frozen = plain.get(TRAINS_NONE) if trained.module == LLM else None
    share = spec.mean(lambda kind: sum(map(sum, kind.adapters)) / max(kind.num_used_params, 1))
    backward, others = [(1.0, trained.backward_s)], [trained]
    if frozen is not None:
        again = [(1.0, curve.layer_part(plain.get(TRAINS_ALL, trained).forward_s))] if trained.recompute else []
        backward, others = [(1.0, frozen.backward_s), *again], [trained, frozen]
    added = curve.layer_part(trained.forward_s)
    return with_table_id(
        dataclasses.replace(
            trained,
            source=DERIVED,
            trains=TRAINS_ADAPTERS,
            forward_s=curve.combine([(1.0, trained.forward_s), (share, added)]),
            backward_s=curve.combine([*backward, (2 * share, added)]),
            activation_bytes=_kept(trained, frozen, spec),
            num_measurements=min(t.num_measurements for t in others),
            median_error_frac=max(t.median_error_frac for t in others),
            p95_error_frac=max(t.p95_error_frac for t in others),
        )
    )


def _kept(trained: CostTable, frozen: CostTable | None, spec: ModuleSpec) -> CostTerms:
    """What layers keep at most, by what is known of trained ones and of frozen ones; the edge of frozen ones."""
    if trained.recompute:  # layers keep their input alone
        return trained.activation_bytes
    value_bytes = bytes_per_value(trained.dtype) / trained.tp
    found = _plus(trained.activation_bytes, value_bytes * spec.mean(lambda kind: kind.num_adapter_values))
    if frozen is None:
        return found
    other = _plus(frozen.activation_bytes, value_bytes * spec.mean(lambda kind: kind.num_adapter_inputs))
    least = min(found, other, key=lambda terms: terms.layer_per_token)
    return curve.combine([(1.0, least), (0.0, frozen.activation_bytes)], [0.0, 1.0])


def _plus(terms: CostTerms, bytes_per_token: float) -> CostTerms:
    return dataclasses.replace(terms, layer_per_token=max(0.0, terms.layer_per_token + bytes_per_token))
