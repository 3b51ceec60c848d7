"""The cost of a module at a tensor-parallel degree nobody measured, from its table at tp 1.

Layers are cut as `dflop/models/tensor_split.py` says: matmuls and attention heads over the ranks, norms and residuals
on every rank, one all-reduce of the hidden states behind attention and one behind the MLP, in each direction. So the
terms that grow with the load are divided by the degree and by an efficiency, launches stay, and all-reduces are added
where a link is known. An LLM's head is cut, too, and its edge divided with it; an encoder's edge stays whole, and so
do the edge's parameters, for the embedding is. The efficiency is that of the planner's synthetic studies: a guess for
what smaller matmuls lose, on top of the all-reduces, and therefore cautious; a measured table replaces all of it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dflop.cost import curve
from dflop.cost.activations import layer_bytes_per_token
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.link_costs import ALL_REDUCE, LinkModel
from dflop.records import LLM, CostTable, CostTerms, ModuleSpec

EFFICIENCY = {1: 1.0, 2: 0.94, 4: 0.85, 8: 0.73}
"""Of splitting a layer over so many ranks; in between it falls linearly with the logarithm of the degree."""
LAYER_ALL_REDUCES = 2
"""Per pass, of the hidden states."""
EDGE_ALL_REDUCES = (2, 1)
"""Of an LLM's head: forward, of 3 float32 numbers per token; backward, of the hidden states."""


def efficiency(tp: int) -> float:
    """Part of the ideal speed-up that `tp` ranks reach; beyond 8 each doubling costs what the last one did."""
    steps = [math.log2(degree) for degree in EFFICIENCY]
    inside = float(np.interp(math.log2(tp), steps, list(EFFICIENCY.values())))
    doublings_beyond = max(0.0, math.log2(tp) - steps[-1])
    return inside * math.pow(EFFICIENCY[8] / EFFICIENCY[4], doublings_beyond)


def replicated_frac(spec: ModuleSpec) -> float:
    """Part of a layer's activation bytes that every rank keeps whole: inputs and outputs of both norms."""
    whole, split = layer_bytes_per_token(spec)
    return whole / (whole + split)


def all_reduces(
    spec: ModuleSpec, tp: int, links: LinkModel, bytes_per_hidden: int, *, recompute: bool
) -> tuple[CostTerms, CostTerms]:
    """(forward, backward) seconds of the messages between the ranks, which sit on one node; zero without a link."""
    # Latency, and what a token adds to it: a link's cost is a line.
    latency_s = links.seconds(ALL_REDUCE, 1e-9, tp, 1)
    hidden_s = links.seconds(ALL_REDUCE, spec.hidden_size * bytes_per_hidden, tp, 1) - latency_s
    numbers_s = links.seconds(ALL_REDUCE, 3 * 4, tp, 1) - latency_s
    has_head = spec.module == LLM

    def terms(num_layer: int, num_edge: int, edge_token_s: float) -> CostTerms:
        return CostTerms(
            layer_fixed=num_layer * latency_s,
            layer_per_token=num_layer * hidden_s,
            layer_per_sq_token=0.0,
            edge_fixed=has_head * num_edge * latency_s,
            edge_per_token=has_head * num_edge * edge_token_s,
            edge_per_item=0.0,
        )

    forward, backward = EDGE_ALL_REDUCES
    # Recomputation runs the forward pass of the layers again, its all-reduces included.
    return (
        terms(LAYER_ALL_REDUCES, forward, numbers_s),
        terms((1 + recompute) * LAYER_ALL_REDUCES, backward, hidden_s),
    )


def derive_table(base: CostTable, tp: int, spec: ModuleSpec, links: LinkModel) -> CostTable:
    """Table of `base`'s module at `tp`, marked `derived`.

    Args:
        base: The table at tp 1, frozen or recomputed as the result shall be.
        tp: Degree; the ranks are taken to sit on one node.
        spec: Hidden size, and the split of activation bytes.
        links: All-reduces; left out where it knows none.
    """
    speedup = tp * efficiency(tp)
    cuts_edge = spec.module == LLM
    forward, backward = all_reduces(spec, tp, links, bytes_per_value(base.dtype), recompute=base.recompute)
    if curve.layer_part(base.backward_s) == curve.ZERO:  # under these layers nothing trains
        backward = curve.edge_part(backward)
    kept = 1.0 if base.recompute else replicated_frac(spec)
    share = kept + (1.0 - kept) / tp
    return with_table_id(
        dataclasses.replace(
            base,
            tp=tp,
            source="derived",
            forward_s=curve.combine([(1.0, _cut(base.forward_s, speedup, cuts_edge)), (1.0, forward)]),
            backward_s=curve.combine([(1.0, _cut(base.backward_s, speedup, cuts_edge)), (1.0, backward)]),
            activation_bytes=curve.combine([(share, base.activation_bytes)], [1.0 / tp if cuts_edge else 1.0]),
            layer_param_bytes=-(-base.layer_param_bytes // tp),
        )
    )


def _cut(terms: CostTerms, speedup: float, cuts_edge: bool) -> CostTerms:
    """Terms that grow with the load, divided by the speed-up; launches as they were."""
    divided = curve.combine([(1.0 / speedup, terms)], [1.0 / speedup if cuts_edge else 1.0])
    return dataclasses.replace(divided, layer_fixed=terms.layer_fixed, edge_fixed=terms.edge_fixed)
