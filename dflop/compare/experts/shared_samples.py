"""Costs of replicas whose neighbouring ranks share samples: each has its part of the tokens, attention sees all.

Ulysses' sequence parallelism (arXiv 2309.14509) sends queries, keys, values and results to ranks with a part of the
heads each, and keys of grouped queries once per head of these. Context parallelism passes keys and values around a
ring, and in the backward pass their gradients, too. None of it is hidden. The ranks sit on one node, a sample's media
items are dealt over them 3 % unevenly, and parts of a sample are equally long to attention (Megatron-LM's zigzag).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflop.compare.experts.expert_plan import rank_share
from dflop.cost import curve
from dflop.cost.expert_parallel import exchange_seconds, slower_frac
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.link_costs import ALL_REDUCE, P2P, LinkModel
from dflop.cost.model import CostModel
from dflop.plan.candidates import has_table
from dflop.plan.space import Problem
from dflop.records import LLM, CostTable, CostTerms, ModuleSpec, RunMode

NUM_ALL_TO_ALLS = 4
"""Per layer and pass: queries, keys, values, results."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """A way to share samples."""

    name: str
    """Name of the degree, as `sp` in `sp4`."""
    message_s: Callable[[ModuleSpec, CostTable, int, LinkModel], tuple[float, float]]
    """Forward through one layer with so many ranks: (latency, what each token of a microbatch adds)."""
    backward_ratio: int
    """Messages backward over messages forward."""


def _all_to_alls_s(spec: ModuleSpec, table: CostTable, num_ranks: int, links: LinkModel) -> tuple[float, float]:
    """Each moves half of what an all-reduce does. Layers with a state send what enters the state and leaves it."""
    num_values = NUM_ALL_TO_ALLS * spec.query_width + spec.state_width
    held_bytes = bytes_per_value(table.dtype) * num_values / (table.tp * num_ranks)
    latency_s, s_per_byte = links.line(ALL_REDUCE, num_ranks, 1)
    return NUM_ALL_TO_ALLS * latency_s, s_per_byte * held_bytes / 2


def _ring_s(spec: ModuleSpec, table: CostTable, num_ranks: int, links: LinkModel) -> tuple[float, float]:
    num_values = 2 * spec.key_width + spec.state_width / num_ranks  # states go by heads, as in Ulysses
    held_bytes = bytes_per_value(table.dtype) * num_values / (table.tp * num_ranks)
    latency_s, s_per_byte = links.line(P2P, 2, 1)
    return (num_ranks - 1) * latency_s, (num_ranks - 1) * s_per_byte * held_bytes


SEQUENCE = Sharing("sp", _all_to_alls_s, 1)
CONTEXT = Sharing("cp", _ring_s, 2)


def shared_costs(problem: Problem, sharing: Sharing, num_ranks: int, ep: int = 1) -> CostModel:
    """Costs at tp times `num_ranks`, for groups of so many tensor-parallel groups that share samples.

    With `ep` > 1 ranks share experts, too, at what that costs our plans (`dflop/cost/expert_parallel.py`).
    """
    cost, tables, links = problem.cost, [], LinkModel(problem.cost.links)
    for spec in problem.specs:
        for tp in problem.tps(spec):
            for mode in (RunMode(tp), RunMode(tp, recompute=True)):
                if has_table(cost, spec.module, mode):
                    table = _shared(cost.table(spec.module, mode), spec, sharing, num_ranks, links)
                    if ep > 1 and spec.module == LLM:
                        alone = cost.table(LLM, mode)
                        table = _with_experts(table, alone, spec, ep, rank_share(LLM, num_ranks), links)
                    tables.append(table)
    return CostModel(
        tables,
        cost.corrections,
        links=cost.links,
        extrapolate=True,
    )


def _shared(table: CostTable, spec: ModuleSpec, sharing: Sharing, num_ranks: int, links: LinkModel) -> CostTable:
    """Costs of a group's microbatch on the rank that has most of it."""
    share, forward, backward = rank_share(spec.module, num_ranks), curve.ZERO, curve.ZERO
    if spec.module == LLM and num_ranks > 1:
        latency_s, token_s = sharing.message_s(spec, table, num_ranks, links)
        forward = dataclasses.replace(curve.ZERO, layer_fixed=latency_s, layer_per_token=token_s)
        backward = curve.combine([(sharing.backward_ratio + table.recompute, forward)])

    return with_table_id(
        dataclasses.replace(
            table,
            tp=table.tp * num_ranks,
            source="derived",
            forward_s=curve.combine([(1.0, _cut(table.forward_s, share)), (1.0, forward)]),
            backward_s=curve.combine([(1.0, _cut(table.backward_s, share)), (1.0, backward)]),
            activation_bytes=curve.combine([(share, table.activation_bytes)]),
        )
    )


def _cut(terms: CostTerms, share: float) -> CostTerms:
    """Each rank is as far up the curve as its share of the tokens, and has all launches."""
    part = curve.combine([(share, terms)])
    knots = tuple(knot / share for knot in part.layer_knots)
    return dataclasses.replace(part, layer_fixed=terms.layer_fixed, edge_fixed=terms.edge_fixed, layer_knots=knots)


def _with_experts(
    table: CostTable, alone: CostTable, spec: ModuleSpec, ep: int, share: float, links: LinkModel
) -> CostTable:
    """With the rows that ranks exchange and wait for, each with such a share of the tokens; `alone` is of one rank."""
    of_rank = np.array([share, 2 * share])
    once_s = exchange_seconds(spec, ep, of_rank, links.line(P2P, 2, 1), bytes_per_value(table.dtype)).tolist()
    token_s = once_s[1] - once_s[0]
    rows = dataclasses.replace(curve.ZERO, layer_fixed=once_s[0] - token_s, layer_per_token=token_s)

    def slower(terms: CostTerms) -> CostTerms:
        return dataclasses.replace(curve.layer_part(_cut(terms, share)), layer_per_sq_token=0.0)

    forward, backward = (
        curve.combine([(1.0, terms), (times, rows), (slower_frac(spec), slower(of_one))])
        for terms, of_one, times in (
            (table.forward_s, alone.forward_s, 1.0),
            (table.backward_s, alone.backward_s, 1.0 + table.recompute),
        )
    )
    return with_table_id(dataclasses.replace(table, forward_s=forward, backward_s=backward))
