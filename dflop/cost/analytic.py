"""Cost tables and link costs from data sheets, for planning on hardware nobody has at hand.

Never fitted to hardware: what follows is a model of it, and every table made here is marked `analytic`.

Matmuls take `flops / (peak * efficiency(t))`. The efficiency saturates with the t tokens of a microbatch, as
`best * t / (t + 200 tp)` for an LLM with a best of 0.62 and `t / (t + 500 tp)` for encoders with a best of 0.5; the
curve, the loss to tensor parallelism and attention's 0.42 of peak are those of the synthetic studies this planner was
developed on. Such a time is `(t + 200 tp)` times a constant: a line with a fixed part, so these tables need no knots.
The fixed part is more than the time the weights take to be read from memory, below which no layer can go (on all of
`devices.py`). Attention over a sequence of u tokens takes 4 u^2 h FLOPs, half of them where
it is causal. Every layer launches some 15 kernels. A backward pass costs two forward ones, one with frozen weights,
and one more that recomputes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from dflop.cost import curve
from dflop.cost.activations import edge_bytes, layer_bytes_per_token
from dflop.cost.devices import Device
from dflop.cost.identity import with_table_id
from dflop.cost.link_costs import ALL_GATHER, ALL_REDUCE, P2P, LinkModel, moved_frac
from dflop.cost.tensor_parallel import all_reduces, efficiency
from dflop.records import LLM, CostTable, CostTerms, LinkCost, ModuleSpec

BYTES_PER_VALUE = 2
LLM_BEST_FRAC, ENCODER_BEST_FRAC, ATTENTION_FRAC = 0.62, 0.5, 0.42
"""Of peak."""
LLM_HALF_TOKENS, ENCODER_HALF_TOKENS = 200, 500
"""Tokens per rank at which matmuls reach half of their best."""
ENCODER_TP_EXPONENT = 1.3
"""Narrow encoders lose more to being split."""
LAUNCH_S = 15 * 3e-6
"""Gaps between the kernels of a layer."""
MEMORY_FRAC, LINK_FRAC = 0.8, 0.8
"""Of the data sheet's rate that long transfers reach."""
OPTIMIZER_BYTES_PER_PARAM = 28
"""AdamW: gradient 2 read; float32 weight and two moments read and written, 24; 16-bit weight 2 written."""
NVLINK_LATENCY_S, NETWORK_LATENCY_S = 10e-6, 20e-6
"""Of a message between two ranks; collectives take it once per doubling of the ranks."""
SOFTWARE = "analytic"


def matmul_efficiency(spec: ModuleSpec, num_tokens: float, tp: int) -> float:
    """Part of `tp` devices' peak that the matmuls of a microbatch reach."""
    best, half_tokens, exponent = _constants(spec)
    return float(best * efficiency(tp) ** exponent * num_tokens / (num_tokens + half_tokens * tp))


def analytic_cost_tables(
    specs: Sequence[ModuleSpec],
    device: Device,
    *,
    profile_key: str,
    frozen: Iterable[str] = (),
    recompute: Iterable[bool] = (False, True),
) -> list[CostTable]:
    """Tables of every module at each of its `tp_choices`, with and without recomputation.

    Args:
        specs: Modules.
        device: Hardware.
        profile_key: Copied into the tables.
        frozen: Modules whose weights take no gradients.
        recompute: Ways to make tables for.
    """
    held, ways = set(frozen), sorted(set(recompute))
    return [
        _table(spec, device, tp, profile_key, is_frozen=spec.module in held, recompute=way)
        for spec in specs
        for tp in spec.tp_choices
        for way in ways
    ]


def _table(
    spec: ModuleSpec, device: Device, tp: int, profile_key: str, *, is_frozen: bool, recompute: bool
) -> CostTable:
    once = _forward(spec, device, tp)
    layer_backward = (1.0 if is_frozen else 2.0) + recompute
    backward = curve.combine([(layer_backward, once)], [1.0 if is_frozen else 2.0])
    links = LinkModel(analytic_link_costs(device, num_nodes=1, num_processes_per_node=tp, profile_key=profile_key))
    forward_exchange, backward_exchange = all_reduces(spec, tp, links, BYTES_PER_VALUE, recompute=recompute)
    whole, split = layer_bytes_per_token(spec, is_frozen=is_frozen, recompute=recompute)
    edge_per_token, edge_per_item = edge_bytes(spec, tp, is_frozen=is_frozen)
    return with_table_id(
        CostTable(
            table_id="",
            profile_key=profile_key,
            module=spec.module,
            hardware=device.name,
            software=SOFTWARE,
            dtype="bfloat16",
            tp=tp,
            source="analytic",
            num_layers=spec.num_layers,
            forward_s=curve.combine([(1.0, once), (1.0, forward_exchange)]),
            backward_s=curve.combine([(1.0, backward), (1.0, backward_exchange)]),
            activation_bytes=dataclasses.replace(
                curve.ZERO,
                layer_per_token=whole + split / tp,
                edge_per_token=edge_per_token,
                edge_per_item=edge_per_item,
            ),
            layer_param_bytes=-(-BYTES_PER_VALUE * spec.num_layer_params // tp),
            edge_param_bytes=BYTES_PER_VALUE * spec.num_edge_params,
            num_measurements=0,
            median_error_frac=0.0,
            p95_error_frac=0.0,
            is_frozen=is_frozen,
            recompute=recompute,
            optimizer_s_per_param=0.0
            if is_frozen
            else OPTIMIZER_BYTES_PER_PARAM / (MEMORY_FRAC * device.memory_bytes_per_s),
        )
    )


def _forward(spec: ModuleSpec, device: Device, tp: int) -> CostTerms:
    """Compute of a forward pass on one of `tp` ranks, no messages."""
    best, half_tokens, exponent = _constants(spec)
    lost = efficiency(tp) ** exponent
    peak, is_llm = device.peak_bf16_flops, spec.module == LLM
    per_token_s = 2.0 * spec.num_layer_params / (peak * best * lost * tp)
    sq_flops = (2.0 if is_llm else 4.0) * spec.hidden_size
    # An embedding is looked up, not multiplied: half of an LLM's edge is its head, which is split like a layer and
    # works on the tokens that carry loss, its items.
    edge_params, edge_tp, edge_lost = (spec.num_edge_params / 2, tp, lost) if is_llm else (spec.num_edge_params, 1, 1.0)
    edge_s = 2.0 * edge_params / (peak * best * edge_lost * edge_tp)
    return CostTerms(
        layer_fixed=per_token_s * half_tokens * tp + LAUNCH_S,
        layer_per_token=per_token_s,
        layer_per_sq_token=sq_flops / (peak * ATTENTION_FRAC * lost * tp),
        edge_fixed=edge_s * half_tokens * edge_tp + LAUNCH_S,
        edge_per_token=0.0 if is_llm else edge_s,
        edge_per_item=edge_s if is_llm else 0.0,
    )


def _constants(spec: ModuleSpec) -> tuple[float, int, float]:
    """(best fraction of peak, tokens at half of it, exponent of the loss to tensor parallelism)."""
    if spec.module == LLM:
        return LLM_BEST_FRAC, LLM_HALF_TOKENS, 1.0
    return ENCODER_BEST_FRAC, ENCODER_HALF_TOKENS, ENCODER_TP_EXPONENT


def analytic_link_costs(
    device: Device, *, num_nodes: int, num_processes_per_node: int, profile_key: str
) -> list[LinkCost]:
    """Messages and collectives over 2, 4, 8, ... ranks of a node, and over 2, 4, 8, ... nodes, one rank each or all.

    A ring moves data as fast as its slowest link: NVLink inside a node, between nodes the adapters of the ranks that
    take part, which share the work. Rates are those of the buffer, as `LinkCost` wants them.
    """
    groups = [(ranks, 1) for ranks in _doublings(num_processes_per_node)]
    for nodes in _doublings(num_nodes):
        groups += [(nodes * ranks, nodes) for ranks in sorted({1, num_processes_per_node})]
    found = [_link(device, P2P, 2, nodes, profile_key) for nodes in (1, 2) if nodes <= num_nodes]
    return found + [
        _link(device, op, ranks, nodes, profile_key) for op in (ALL_REDUCE, ALL_GATHER) for ranks, nodes in groups
    ]


def _doublings(most: int) -> list[int]:
    """2, 4, 8, ... below `most`, and `most` itself; nothing for one."""
    return sorted({*(2**k for k in range(1, most.bit_length()) if 2**k < most), most} - {1})


def _link(device: Device, op: str, num_ranks: int, num_nodes: int, profile_key: str) -> LinkCost:
    rate = device.nvlink_bytes_per_s
    if num_nodes > 1:
        rate = min(rate, device.network_bytes_per_s * max(1, num_ranks // num_nodes))
    latency_s = NVLINK_LATENCY_S if num_nodes == 1 else NETWORK_LATENCY_S
    return LinkCost(
        profile_key=profile_key,
        hardware=device.name,
        software=SOFTWARE,
        op=op,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        latency_s=latency_s * (num_ranks.bit_length() - 1),
        bytes_per_s=LINK_FRAC * rate / moved_frac(op, num_ranks),
        source="analytic",
        num_measurements=0,
        median_error_frac=0.0,
    )
