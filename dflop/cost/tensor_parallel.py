"""The cost of a module at a tensor-parallel degree nobody measured, from its table at tp 1.

Layers are cut as `dflop/models/tensor_split.py` says: matmuls and attention heads over the ranks, norms and residuals
on every rank, one all-reduce of the hidden states behind attention and one behind the MLP, in each direction. So the
terms that grow with the load are divided by the degree and by an efficiency, launches stay, and all-reduces are added
where a link is known. The edge stays whole. The efficiency is that of the planner's synthetic studies: a guess for
what smaller matmuls lose, on top of the all-reduces, and therefore cautious; a measured table replaces all of it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dflop.cost import curve
from dflop.cost.activations import layer_bytes_per_token
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.links import ALL_REDUCE, LinkModel
from dflop.records import CostTable, CostTerms, ModuleSpec

EFFICIENCY = {1: 1.0, 2: 0.94, 4: 0.85, 8: 0.73}
"""Of splitting a layer over so many ranks; in between it falls linearly with the logarithm of the degree."""
ALL_REDUCES_PER_PASS = 2


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


def derive_table(base: CostTable, tp: int, spec: ModuleSpec, links: LinkModel) -> CostTable:
    """Table of `base`'s module at `tp`, marked `derived`.

    Args:
        base: The table at tp 1, frozen or recomputed as the result shall be.
        tp: Degree; the ranks are taken to sit on one node.
        spec: Hidden size, and the split of activation bytes.
        links: All-reduces; left out where it knows none.
    """
    speedup = tp * efficiency(tp)
    hidden_bytes = spec.hidden_size * bytes_per_value(base.dtype)
    # Latency and rate of the all-reduce of one token's hidden state, as terms of a layer.
    latency_s = links.seconds(ALL_REDUCE, 1e-9, tp, 1)
    per_token_s = links.seconds(ALL_REDUCE, hidden_bytes, tp, 1) - latency_s
    exchange = dataclasses.replace(
        curve.ZERO, layer_fixed=ALL_REDUCES_PER_PASS * latency_s, layer_per_token=ALL_REDUCES_PER_PASS * per_token_s
    )
    kept = replicated_frac(spec) if not base.recompute else 1.0
    share = kept + (1.0 - kept) / tp
    return with_table_id(
        dataclasses.replace(
            base,
            tp=tp,
            source="derived",
            forward_s=curve.combine([(1.0, _split(base.forward_s, speedup)), (1.0, exchange)]),
            # Recomputation runs the forward pass again, its all-reduces included.
            backward_s=curve.combine([(1.0, _split(base.backward_s, speedup)), (1.0 + base.recompute, exchange)]),
            activation_bytes=curve.combine([(share, base.activation_bytes)], [1.0]),
            layer_param_bytes=-(-base.layer_param_bytes // tp),
        )
    )


def _split(terms: CostTerms, speedup: float) -> CostTerms:
    """Layer terms that grow with the load, divided by the speed-up."""
    divided = curve.combine([(1.0 / speedup, terms)], [1.0])
    return dataclasses.replace(divided, layer_fixed=terms.layer_fixed)
