from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflop.cost.analytic import LAUNCH_S, analytic_cost_tables, analytic_link_costs, matmul_efficiency
from dflop.cost.curve import evaluate
from dflop.cost.devices import A100, DEVICES, H100, H200, find_device
from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import CostTable, ModuleSpec

QWEN_7B = ModuleSpec(
    "llm", 28, 3584, 28, 4, 128, 18_944, 8 * 3584, 233_057_792, 1_089_994_752, 28, (1, 2, 4, 8), num_mlp_tensors=4,
    vocab_size=152_064,
)  # fmt: skip
SIGLIP = ModuleSpec("vision", 27, 1152, 16, 16, 72, 4304, 4 * 1152, 15_230_000, 4_000_000, 1, (1, 2))


def table(spec: ModuleSpec, tp: int = 1, *, device=H100, recompute: bool = False, is_frozen: bool = False) -> CostTable:
    tables = analytic_cost_tables([spec], device, profile_key="p", frozen=[spec.module] if is_frozen else [])
    return next(t for t in tables if (t.tp, t.recompute) == (tp, recompute))


@pytest.mark.parametrize(("spec", "tp"), [(QWEN_7B, 1), (QWEN_7B, 8), (SIGLIP, 1), (SIGLIP, 2)])
def test_the_line_is_the_efficiency_curve(spec, tp):
    """No knot is needed: from 1 to a million tokens the line equals flops / (peak * efficiency)."""
    tokens = np.unique(np.logspace(0, 6, 200).astype(int))
    expected = [
        2 * spec.num_layer_params * int(t) / (tp * H100.peak_bf16_flops * matmul_efficiency(spec, t, tp)) + LAUNCH_S
        for t in tokens
    ]
    whole = table(spec, tp)
    found = evaluate(whole.forward_s, (1, tokens, 0), 1, edge=False)
    if tp > 1:
        links = analytic_link_costs(H100, num_nodes=1, num_processes_per_node=tp, profile_key="p")
        model = CostModel([], links=links)
        found = found - [2 * model.sync_seconds(float(t) * spec.hidden_size * 2, tp, 1) for t in tokens]
    assert whole.forward_s.layer_knots == ()
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("spec", [QWEN_7B, SIGLIP], ids=["llm", "vision"])
def test_no_layer_is_faster_than_its_weights_are_read(device, spec):
    for tp in spec.tp_choices:
        forward = table(spec, tp, device=device).forward_s
        assert forward.layer_fixed > 2 * spec.num_layer_params / tp / device.memory_bytes_per_s


def test_ways_of_running_differ_by_passes():
    passes = {}
    for is_frozen, recompute in itertools.product((False, True), repeat=2):
        t = table(QWEN_7B, recompute=recompute, is_frozen=is_frozen)
        load = ((1, 5000, 10**7), 28)
        layers = [float(evaluate(terms, *load, edge=False)) for terms in (t.forward_s, t.backward_s)]
        edge = [float(evaluate(terms, load[0], 0, edge=True)) for terms in (t.forward_s, t.backward_s)]
        passes[is_frozen, recompute] = (layers[1] / layers[0], edge[1] / edge[0])
    expected = {(False, False): (2, 2), (False, True): (3, 2), (True, False): (1, 1), (True, True): (2, 1)}
    assert {way: pytest.approx(ratio) for way, ratio in expected.items()} == passes


def test_a_large_model_reaches_a_plausible_part_of_peak():
    """Model FLOPs of 8192 packed tokens in sequences of 1024, over the time at full depth."""
    cost = CostModel(analytic_cost_tables([QWEN_7B], H100, profile_key="p", recompute=[False]))
    for tp, low, high in ((1, 0.5, 0.62), (8, 0.15, 0.45)):
        seconds = sum(cost.module_seconds("llm", 8192, 8192, 8 * 1024**2, num_layers=28, edge=True, tp=tp))
        flops = 6 * 8192 * (28 * QWEN_7B.num_layer_params + QWEN_7B.num_edge_params / 2)
        assert low < flops / (float(seconds) * tp * H100.peak_bf16_flops) < high


def test_activation_bytes_agree_with_a_count_of_the_whole_model():
    """Qwen2.5-7B, 4096 tokens, 28 layers: fake tensors counted 29.85 GiB, with keys copied for every query head."""
    cost = CostModel([table(QWEN_7B)])
    found = float(cost.activation_bytes("llm", 4096, 4096, 4096**2, num_layers=28, edge=True))
    assert 0.85 < found / (29.85 * 2**30) < 1.0


def test_ranks_share_what_is_split():
    one, eight = table(QWEN_7B), table(QWEN_7B, 8)
    assert eight.layer_param_bytes == -(-one.layer_param_bytes // 8)
    ratio = eight.activation_bytes.layer_per_token / one.activation_bytes.layer_per_token
    assert 1 / 8 < ratio < 1 / 2
    # Beside the hidden state, which is whole: of the vocabulary an eighth, in 16 bit where one rank has 32.
    one_logits, eight_logits = (t.activation_bytes.edge_per_item - 2 * QWEN_7B.hidden_size for t in (one, eight))
    assert eight_logits == pytest.approx(one_logits / 16)
    assert table(SIGLIP, 2).activation_bytes.edge_per_token == table(SIGLIP).activation_bytes.edge_per_token


def test_links_are_as_fast_as_their_slowest_part():
    links = analytic_link_costs(H100, num_nodes=4, num_processes_per_node=8, profile_key="p")
    model = CostModel([], links=links)
    gigabyte = 1e9
    assert model.sync_seconds(gigabyte, 8, 1) == pytest.approx(2 * 7 / 8 * gigabyte / (0.8 * 450e9), rel=0.02)
    assert model.sync_seconds(gigabyte, 4, 4) == pytest.approx(2 * 3 / 4 * gigabyte / (0.8 * 50e9), rel=0.02)
    assert model.sync_seconds(gigabyte, 32, 4) < model.sync_seconds(gigabyte, 4, 4)
    assert model.p2p_seconds(gigabyte, 2) > 5 * model.p2p_seconds(gigabyte, 1)
    groups = {(link.num_ranks, link.num_nodes) for link in links if link.op == "all_reduce"}
    assert groups == {(2, 1), (4, 1), (8, 1), (2, 2), (16, 2), (4, 4), (32, 4)}


def test_devices_are_found_by_what_drivers_call_them():
    assert find_device("NVIDIA A100-SXM4-80GB") is A100
    assert find_device("NVIDIA H200") is H200
    with pytest.raises(CostError, match="no data sheet of device `H20O`") as caught:
        find_device("H20O")
    assert "h200" in caught.value.hint
