import dataclasses
import itertools

import numpy as np
import pytest

from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.curve import evaluate
from dflop.cost.devices import A100, A100_40, B200, DEVICES, ENCODERS, H100, H200, find_device
from dflop.cost.model import CostModel
from dflop.cost.roofline import DECODER_LAUNCH_S, ENCODER_LAUNCH_S, backward_work, layer_work
from dflop.errors import ConfigError
from dflop.records import CostTable, LayerKind, ModuleSpec, RunMode

QWEN_7B = ModuleSpec(
    "llm", ((LayerKind("attention", 233_057_792, 28, 4, 128, 18_944, 8 * 3584, num_mlp_tensors=4), 28),), 3584,
    1_089_994_752, 28, (1, 2, 4, 8), vocab_size=152_064,
)  # fmt: skip
SIGLIP = ModuleSpec(
    "vision", ((LayerKind("attention", 15_230_000, 16, 16, 72, 4304, 4 * 1152), 27),), 1152, 4_000_000, 1, (1, 2)
)


def table(spec: ModuleSpec, tp: int = 1, *, device=H100, recompute: bool = False, is_frozen: bool = False) -> CostTable:
    tables = analytic_cost_tables([spec], device, profile_key="p", frozen=[spec.module] if is_frozen else [])
    return next(t for t in tables if (t.tp, t.recompute) == (tp, recompute))


@pytest.mark.parametrize(("spec", "tp"), [(QWEN_7B, 1), (QWEN_7B, 8), (SIGLIP, 1), (SIGLIP, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_takes_as_long_as_its_launches_or_its_work(spec, tp, recompute):
    tokens = np.unique(np.logspace(0, 6, 200).astype(int))
    once = layer_work(spec, tp)
    links = analytic_link_costs(H100, num_nodes=1, num_processes_per_node=tp, profile_key="p")
    message_s = [CostModel([], links=links).sync_seconds(float(t) * spec.hidden_size * 2, tp, 1) for t in tokens]
    whole = table(spec, tp, recompute=recompute)
    launch_s = DECODER_LAUNCH_S if spec.module == "llm" else ENCODER_LAUNCH_S
    again = backward_work(once, recomputed_frac=float(recompute))
    passes = (whole.forward_s, once, 1, 2), (whole.backward_s, again, 1 + recompute, 3 + 2 * recompute)
    for terms, work, num_passes, num_messages in passes:
        expected = np.maximum(work.seconds_per_token(H100) * tokens, num_passes * launch_s)
        expected += work.seconds_per_sq_token(H100) * 1e6 + num_messages * np.array(message_s)
        assert evaluate(terms, (1, tokens, 1e6), 1, edge=False) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("spec", [QWEN_7B, SIGLIP], ids=["llm", "vision"])
def test_no_layer_is_faster_than_its_weights_are_read(device, spec):
    for tp in spec.tp_choices:
        forward = table(spec, tp, device=device).forward_s
        assert forward.layer_fixed > 2 * spec.kinds[0].num_params / tp / device.memory_bytes_per_s


def test_frozen_weights_save_matmuls_and_no_attention():
    times = {}
    for is_frozen, recompute in itertools.product((False, True), repeat=2):
        t = table(QWEN_7B, recompute=recompute, is_frozen=is_frozen)
        times[is_frozen, recompute] = [
            float(evaluate(terms, load, 28, edge=False))
            for terms in (t.forward_s, t.backward_s)
            for load in ((1, 50_000, 0), (1, 50_000, 10**9))
        ]
    matmul_s = 28 * 50_000 * 2 * QWEN_7B.kinds[0].num_params / (H100.peak_bf16_flops * H100.matmul_frac)
    forward_s, forward_sq_s, *_ = times[False, False]
    sq_s = forward_sq_s - forward_s
    for (is_frozen, recompute), (_, _, backward_s, backward_sq_s) in times.items():
        assert backward_s == pytest.approx((2 + recompute) * forward_s - is_frozen * matmul_s)
        assert backward_sq_s - backward_s == pytest.approx((2.5 + recompute) * sq_s)


def test_a_head_costs_by_its_vocabulary_whether_it_is_tied_or_not():
    tied = dataclasses.replace(QWEN_7B, is_tied=True, num_edge_params=QWEN_7B.num_edge_params // 2)
    one, other = (table(spec).forward_s.edge_per_item for spec in (QWEN_7B, tied))
    assert one == other > 0
    matmul_s = 2 * QWEN_7B.vocab_size * QWEN_7B.hidden_size / (H100.peak_bf16_flops * H100.matmul_frac)
    assert one - table(QWEN_7B, is_frozen=True).forward_s.edge_per_item == pytest.approx(matmul_s)
    assert table(QWEN_7B).backward_s.edge_per_item == 0, "the loss has made all gradients of the head"


def test_a_table_of_two_kinds_is_of_their_mean_layer():
    ((kind, _),) = QWEN_7B.layers
    twin = dataclasses.replace(QWEN_7B, layers=((kind, 3), (dataclasses.replace(kind, name="twin"), 25)))
    tables = [analytic_cost_tables([spec], H100, profile_key="p") for spec in (QWEN_7B, twin)]
    assert tables[0] == tables[1]
    counted = dataclasses.replace(kind, num_params=2 * kind.num_params, kept_bytes_per_token=50_000.0)
    mixed = dataclasses.replace(QWEN_7B, layers=((kind, 7), (counted, 21)))
    plain, found = table(QWEN_7B, 2), table(mixed, 2)
    assert found.layer_param_bytes == plain.layer_param_bytes * 7 / 4
    kept = plain.activation_bytes.layer_per_token
    assert found.activation_bytes.layer_per_token == pytest.approx(kept / 4 + 3 / 4 * 25_000)
    assert plain.forward_s.layer_per_token < found.forward_s.layer_per_token < 2 * plain.forward_s.layer_per_token
    frozen, norms = table(mixed, 2, is_frozen=True), kind.num_norm_values / 2
    assert frozen.activation_bytes.layer_per_token == pytest.approx(found.activation_bytes.layer_per_token - norms)


def test_tables_carry_the_error_of_their_device():
    for spec, accuracy in ((QWEN_7B, H100.accuracy), (SIGLIP, ENCODERS)):
        found = table(spec)
        assert (found.num_measurements, found.median_error_frac) == (accuracy.num_runs, accuracy.median_frac)


def test_a_large_model_reaches_a_plausible_part_of_peak():
    """Model FLOPs of 8192 packed tokens in sequences of 1024, over the time at full depth."""
    cost = CostModel(analytic_cost_tables([QWEN_7B], H100, profile_key="p", recompute=[False]))
    for tp, low, high in ((1, 0.45, 0.62), (8, 0.15, 0.5)):
        seconds = sum(cost.module_seconds("llm", (8192, 8192, 8 * 1024**2), RunMode(tp), num_layers=28, edge=True))
        flops = 6 * 8192 * (QWEN_7B.num_params - QWEN_7B.num_edge_params / 2)
        assert low < flops / (float(seconds) * tp * H100.peak_bf16_flops) < high


def test_activation_bytes_agree_with_a_count_of_the_whole_model():
    """Qwen2.5-7B, 4096 tokens, 28 layers: fake tensors counted 24.95 GiB with as many loss tokens."""
    cost = CostModel([table(QWEN_7B)])
    found = float(cost.activation_bytes("llm", (4096, 4096, 4096**2), num_layers=28, edge=True))
    assert 0.85 < found / (24.95 * 2**30) < 1.0


def test_ranks_share_what_is_split():
    one, eight = table(QWEN_7B), table(QWEN_7B, 8)
    assert eight.layer_param_bytes == -(-one.layer_param_bytes // 8)
    assert eight.activation_bytes.layer_per_token == one.activation_bytes.layer_per_token / 8
    cut, whole = (table(SIGLIP, tp).activation_bytes.layer_per_token for tp in (2, 1))
    assert cut == whole / 2
    assert eight.activation_bytes.edge_per_item == one.activation_bytes.edge_per_item == 2 * QWEN_7B.hidden_size
    assert eight.forward_s.edge_per_item == pytest.approx(one.forward_s.edge_per_item / 8)
    assert table(SIGLIP, 2).activation_bytes.edge_per_token == table(SIGLIP).activation_bytes.edge_per_token


def test_links_are_as_fast_as_their_slowest_part():
    links = analytic_link_costs(H100, num_nodes=4, num_processes_per_node=8, profile_key="p")
    model = CostModel([], links=links)
    gigabyte = 1e9
    assert model.sync_seconds(gigabyte, 8, 1) == pytest.approx(2 * 7 / 8 * gigabyte / (0.8 * 450e9), rel=0.02)
    assert model.sync_seconds(gigabyte, 4, 4) == pytest.approx(2 * 3 / 4 * gigabyte / (0.8 * 50e9), rel=0.02)
    # Two ranks of a node have two of its adapters: others of the same node's ranks use the rest.
    assert model.sync_seconds(gigabyte, 8, 4) == pytest.approx(2 * 7 / 8 * gigabyte / (0.8 * 100e9), rel=0.02)
    assert model.sync_seconds(gigabyte, 32, 4) < model.sync_seconds(gigabyte, 16, 4)
    assert model.p2p_seconds(gigabyte, 2) > 5 * model.p2p_seconds(gigabyte, 1)
    groups = {(link.num_ranks, link.num_nodes) for link in links if link.op == "all_reduce"}
    assert groups == {(n, 1) for n in (2, 4, 8)} | {(n * nodes, nodes) for n in (1, 2, 4, 8) for nodes in (2, 4)}


def test_devices_are_found_by_what_drivers_call_them():
    assert find_device("NVIDIA A100-SXM4-80GB") is A100
    assert find_device("NVIDIA A100-SXM4-40GB") is A100_40
    assert find_device("NVIDIA H200") is H200
    assert find_device("NVIDIA B200") is B200
    with pytest.raises(ConfigError, match="no data sheet of device `H20O`") as caught:
        find_device("H20O")
    assert "h200" in caught.value.hint
