"""The cost of a module at a tensor-parallel degree that was not measured, from its table at tp 1.

The ranks share matmuls and attention heads (`dflop/models/splits.py`), and the tokens of norms and residuals
(`parallel/tokens.py`). Per layer and direction they exchange as much as in two all-reduces of the hidden states, and
the backward pass gathers what enters attention and MLP once more. So the terms that grow with the load are divided by
the degree, the fixed ones stay, and all-reduces are added where a link is known. An LLM's head is cut, too, and the
seconds of its edge are divided with it; an encoder's edge stays whole, and so do an edge's parameters, for the
embedding is, and what it keeps, hidden states. What narrower matmuls lose is not charged: a measured table replaces all
of it.
"""

from __future__ import annotations

import dataclasses

from dflop.cost import curve
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.link_costs import ALL_REDUCE, LinkModel
from dflop.records import LLM, CostTable, CostTerms, ModuleSpec

DERIVED = "derived"
LAYER_ALL_REDUCES = 2
"""Per pass, of the hidden states; two all-gathers are one."""
EDGE_ALL_REDUCES = (2, 1)
"""All-reduces of an LLM's head: forward, of 3 float32 numbers per token; backward, of hidden states. Modules have an
all-gather on top where shares of tokens are put together, half of one."""


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
            edge_per_token=has_head * num_edge * edge_token_s + hidden_s / 2,
            edge_per_item=0.0,
        )

    forward, backward = EDGE_ALL_REDUCES
    # Recomputation runs the forward pass of the layers again, its all-reduces included.
    return (
        terms(LAYER_ALL_REDUCES, forward, numbers_s),
        terms((1 + recompute) * LAYER_ALL_REDUCES + 1, backward, hidden_s),
    )


def derive_table(base: CostTable, tp: int, spec: ModuleSpec, links: LinkModel) -> CostTable:
    """Table of `base`'s module at `tp`, marked `derived`.

    Args:
        base: The table at tp 1, frozen or recomputed as the result shall be.
        tp: Degree; the ranks are taken to sit on one node.
        spec: Says the hidden size.
        links: All-reduces; left out where it knows none.
    """
    cuts_edge = spec.module == LLM

    def cut(terms: CostTerms) -> CostTerms:
        """Terms that grow with the load, divided; fixed ones as they were."""
        divided = curve.combine([(1.0 / tp, terms)], [1.0 / tp if cuts_edge else 1.0])
        return dataclasses.replace(divided, layer_fixed=terms.layer_fixed, edge_fixed=terms.edge_fixed)

    forward, backward = all_reduces(spec, tp, links, bytes_per_value(base.dtype), recompute=base.recompute)
    if curve.layer_part(base.backward_s) == curve.ZERO:  # under these layers nothing trains
        backward = curve.edge_part(backward) if cuts_edge else curve.ZERO
    return with_table_id(
        dataclasses.replace(
            base,
            tp=tp,
            source=DERIVED,
            forward_s=curve.combine([(1.0, cut(base.forward_s)), (1.0, forward)]),
            backward_s=curve.combine([(1.0, cut(base.backward_s)), (1.0, backward)]),
            activation_bytes=curve.combine([(1.0 / tp, base.activation_bytes)], [1.0]),
            layer_param_bytes=-(-base.layer_param_bytes // tp),
        )
    )
