"""The cost of one load, written as the docstring of `CostTerms` says it: what the vectorised code is held to."""

from dflop.records import CostTerms


def cost_of_one_load(
    terms: CostTerms, num_items: int, num_tokens: int, sum_sq_tokens: int, *, num_layers: int, edge: bool
) -> float:
    if num_tokens == 0:
        return 0.0
    layer = terms.layer_fixed + terms.layer_per_token * num_tokens + terms.layer_per_sq_token * sum_sq_tokens
    for knot, bend in zip(terms.layer_knots, terms.layer_bends, strict=True):
        layer += bend * min(num_tokens, knot)
    total = num_layers * layer
    if edge:
        total += terms.edge_fixed + terms.edge_per_token * num_tokens + terms.edge_per_item * num_items
    return total
