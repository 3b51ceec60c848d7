"""Cost tables and link costs from data sheets, for planning on hardware nobody has at hand.

What a layer asks for and how fast devices do it is in `roofline.py`; every table made here is marked `analytic` and
carries the error against published trainings as that of its device. A pass takes as long as its work, or as its kernels
take to be launched where that is longer: eager PyTorch keeps a device waiting on small microbatches. A head multiplies
on the tokens that carry loss, for its gradients, too, while the loss is computed; an embedding is looked up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from dflop.cost import curve
from dflop.cost.activations import edge_bytes, layer_bytes_per_token
from dflop.cost.devices import ENCODERS, Device
from dflop.cost.float8 import RECIPES, Passes, float8_seconds
from dflop.cost.identity import with_table_id
from dflop.cost.link_costs import ALL_GATHER, ALL_REDUCE, HOST_COPY, P2P, LinkModel, moved_frac
from dflop.cost.roofline import (
    BYTES_PER_VALUE,
    DECODER_LAUNCH_S,
    EAGER,
    EDGE_LAUNCH_S,
    ENCODER_LAUNCH_S,
    LOGIT_BYTES,
    Program,
    Work,
    backward_work,
    layer_work,
)
from dflop.cost.tensor_parallel import all_reduces
from dflop.records import FP8_OFF, LLM, TRAINS_ALL, TRAINS_NONE, CostTable, CostTerms, LinkCost, ModuleSpec

LINK_FRAC = 0.8
"""Share of the data sheet's rate that long messages reach."""
HOST_FRAC = 0.7
"""Share of PCIe's rate that copies of page-locked memory reach in each direction while the other is busy, too. An
output of nvbandwidth has 11.3 and 11.5 of gen 3's 16 GB/s. GPUs behind one switch share its link: profile these."""
OPTIMIZER_FRAC = 0.25
"""Share of the memory's rate that AdamW reaches; measured on one H200 (docs/measured.md)."""
OPTIMIZER_BYTES_PER_PARAM = 28
"""AdamW: gradient 2 read; float32 weight and two moments read and written, 24; 16-bit weight 2 written."""
AVERAGE_FRAC = 12 / OPTIMIZER_BYTES_PER_PARAM
"""Share of AdamW's seconds that an average of the weights adds: it is read and written, the float32 weight read."""
NVLINK_LATENCY_S, NETWORK_LATENCY_S = 10e-6, 20e-6
"""Latency of a message between two ranks; collectives take it once per doubling of the ranks."""
SOFTWARE = "analytic"


def analytic_cost_tables(
    specs: Sequence[ModuleSpec],
    device: Device,
    *,
    profile_key: str,
    frozen: Iterable[str] = (),
    recompute: Iterable[bool] = (False, True),
    program: Program = EAGER,
    fp8: str = FP8_OFF,
) -> list[CostTable]:
    """Tables of every module at each of its `tp_choices`, with and without recomputation.

    Args:
        specs: Modules.
        device: Hardware.
        profile_key: Copied into the tables.
        frozen: Modules whose weights take no gradients.
        recompute: Ways to make tables for.
        program: How the layers run; this package trains them eager unless `train.compile` is set.
        fp8: Of an LLM: recipe of its layers' Linears, one of `RECIPES`.

    Raises:
        ConfigError: FP8 is wanted of a device that has no such matmuls.
    """
    held, ways = set(frozen), sorted(set(recompute))
    return [
        _table(spec, device, tp, profile_key, is_frozen=spec.module in held, recompute=way, program=program, fp8=recipe)
        for spec in specs
        for recipe in [fp8 if spec.module == LLM else FP8_OFF]
        for tp in spec.tp_choices
        for way in ways
    ]


def _table(
    spec: ModuleSpec, device: Device, tp: int, profile_key: str, *, is_frozen: bool, recompute: bool, program: Program,
    fp8: str,
) -> CostTable:  # fmt: skip
    once = layer_work(spec, tp)
    again = backward_work(once, is_frozen=is_frozen, recomputed_frac=float(recompute))
    launches_s = program.launch_frac * (DECODER_LAUNCH_S if spec.module == LLM else ENCODER_LAUNCH_S)
    edges = _edges(spec, device, tp, is_frozen=is_frozen)
    links = LinkModel(analytic_link_costs(device, num_nodes=1, num_processes_per_node=tp, profile_key=profile_key))
    messages = all_reduces(spec, tp, links, BYTES_PER_VALUE, recompute=recompute)
    passes = Passes(1.0), Passes(float(recompute), 1.0, float(not is_frozen))
    in_float8 = [
        (0.0, 0.0) if fp8 == FP8_OFF else float8_seconds(spec, tp, device, program, RECIPES[fp8], each)
        for each in passes
    ]
    forward, backward = (
        curve.combine([(1.0, _layer(work, device, program, num * launches_s, more)), (1.0, edge), (1.0, exchange)])
        for work, num, more, edge, exchange in zip(
            (once, again), (1, 1 + recompute), in_float8, edges, messages, strict=True
        )
    )
    edge_per_token, edge_per_item = edge_bytes(spec, is_frozen=is_frozen)
    accuracy = device.accuracy if spec.module == LLM else ENCODERS
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
            forward_s=forward,
            backward_s=backward,
            activation_bytes=dataclasses.replace(
                curve.ZERO,
                layer_per_token=layer_bytes_per_token(spec, is_frozen=is_frozen, recompute=recompute) / tp,
                edge_per_token=edge_per_token,
                edge_per_item=edge_per_item,
            ),
            layer_param_bytes=math.ceil(BYTES_PER_VALUE * spec.mean(lambda kind: kind.num_params) / tp),
            edge_param_bytes=BYTES_PER_VALUE * spec.num_edge_params,
            num_measurements=accuracy.num_runs,
            median_error_frac=accuracy.median_frac,
            p95_error_frac=accuracy.p95_frac,
            trains=TRAINS_NONE if is_frozen else TRAINS_ALL,
            recompute=recompute,
            fp8=fp8,
            optimizer_s_per_param=0.0
            if is_frozen
            else OPTIMIZER_BYTES_PER_PARAM / (OPTIMIZER_FRAC * device.memory_bytes_per_s),
        )
    )


def _layer(
    work: Work, device: Device, program: Program, launches_s: float, in_float8: tuple[float, float]
) -> CostTerms:
    """A pass over a layer: flat while its kernels take longer to be launched than to run, then a line.

    `in_float8` is what FP8 adds, as of `float8_seconds`.
    """
    more_s, cast_s = in_float8
    per_token_s = work.seconds_per_token(device, program) + more_s
    others = dataclasses.replace(
        curve.ZERO, layer_fixed=launches_s + cast_s, layer_per_sq_token=work.seconds_per_sq_token(device)
    )
    return curve.from_slopes([0.0, per_token_s], [launches_s / per_token_s], others)


def _edges(spec: ModuleSpec, device: Device, tp: int, *, is_frozen: bool) -> Iterator[CostTerms]:
    """Forward and backward of what is outside the layers: an LLM's head, cut like a layer; an encoder's, whole."""
    fixed, back = dataclasses.replace(curve.ZERO, edge_fixed=EDGE_LAUNCH_S), 1.0 if is_frozen else 2.0
    if spec.module == LLM:
        head = Work((1.0 + back) * 2.0 * spec.vocab_size * spec.hidden_size / tp, 0.0, 0.0)
        logits_s = LOGIT_BYTES * spec.vocab_size / tp / device.memory_bytes_per_s
        yield dataclasses.replace(fixed, edge_per_item=head.seconds_per_token(device) + logits_s)
        yield fixed
    else:
        for matmuls in (1.0, back):
            edge = Work(matmuls * 2.0 * spec.num_edge_params, 0.0, 0.0)
            yield dataclasses.replace(fixed, edge_per_token=edge.seconds_per_token(device))


def analytic_link_costs(
    device: Device, *, num_nodes: int, num_processes_per_node: int, profile_key: str
) -> list[LinkCost]:
    """Messages and collectives over 2, 4, 8, ... ranks of a node, and over 2, 4, 8, ... nodes, 1, 2, 4, ... ranks each.

    Copies to and from the host are at the PCIe link's rate.
    A ring moves data as fast as its slowest link: NVLink inside a node, between nodes the adapters of the ranks that
    take part, which share the work. Rates are those of the buffer, as `LinkCost` wants them.
    """
    groups = [(ranks, 1) for ranks in _doublings(num_processes_per_node)]
    for nodes in _doublings(num_nodes):
        groups += [(nodes * ranks, nodes) for ranks in (1, *_doublings(num_processes_per_node))]
    found = [_link(device, P2P, 2, nodes, profile_key) for nodes in (1, 2) if nodes <= num_nodes]
    found.append(_link(device, HOST_COPY, num_processes_per_node, 1, profile_key))
    return found + [
        _link(device, op, ranks, nodes, profile_key) for op in (ALL_REDUCE, ALL_GATHER) for ranks, nodes in groups
    ]


def with_sheet_links(
    links: Sequence[LinkCost], device: Device | None, *, num_nodes: int, num_processes_per_node: int
) -> list[LinkCost]:
    """Measured links, and those of the data sheet for operations that were not measured in a node, or between nodes.

    A profile of one node, or of one process, would make the messages that it could not time free.
    """
    if device is None:
        return list(links)
    known = {(link.op, link.num_nodes > 1) for link in links}
    sheet = analytic_link_costs(
        device, num_nodes=num_nodes, num_processes_per_node=num_processes_per_node, profile_key=""
    )
    return [*links, *(link for link in sheet if (link.op, link.num_nodes > 1) not in known)]


def _doublings(most: int) -> list[int]:
    """2, 4, 8, ... below `most`, and `most` itself; nothing for one."""
    return sorted({*(2**k for k in range(1, most.bit_length()) if 2**k < most), most} - {1})


def _link(device: Device, op: str, num_ranks: int, num_nodes: int, profile_key: str) -> LinkCost:
    rate = device.nvlink_bytes_per_s
    if num_nodes > 1:
        rate = min(rate, device.network_bytes_per_s * max(1, num_ranks // num_nodes))
    latency_s = (NVLINK_LATENCY_S if num_nodes == 1 else NETWORK_LATENCY_S) * (num_ranks.bit_length() - 1)
    reached = LINK_FRAC * rate / moved_frac(op, num_ranks)
    if op == HOST_COPY:
        latency_s, reached = NVLINK_LATENCY_S, HOST_FRAC * device.host_bytes_per_s
    return LinkCost(
        profile_key=profile_key,
        hardware=device.name,
        software=SOFTWARE,
        op=op,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        latency_s=latency_s,
        bytes_per_s=reached,
        source="analytic",
        num_measurements=0,
        median_error_frac=0.0,
    )
