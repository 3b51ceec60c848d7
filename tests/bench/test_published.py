import dataclasses

import numpy as np
import pytest

from dflop.cost import published
from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.curve import evaluate
from dflop.cost.devices import A100, H100, H200
from dflop.cost.link_costs import ALL_REDUCE, moved_frac
from dflop.cost.roofline import COMPILED
from dflop.errors import CostError
from dflop.records import FP8_OFF
from tests.bench.published import (
    FLASH_1_FRACS,
    PRIORS,
    error_fracs,
    fit_lines,
    fit_runs,
    package_constants,
    parts_of,
    seconds_of,
    unseen_errors,
)
from tests.bench.published_checks import check_lines, choices, kinds
from tests.bench.published_runs import IN_FP8, LATER, TABLE, read_runs

RUNS = [*read_runs(TABLE), *read_runs(LATER)]
BY_KIND = {"A100": 0.05, "H100": 0.03, "H200": 0.05, "tp > 1": 0.05, "pp > 1": 0.12, "compiled, tp 1": 0.07}
"""Most of the median errors."""


@pytest.fixture(scope="module")
def unseen():
    return unseen_errors(RUNS)


def test_the_constants_of_the_package_are_the_fit_of_all_runs():
    fit = fit_runs(RUNS)
    assert fit.keys() == PRIORS.keys() == package_constants().keys()
    assert fit == pytest.approx(package_constants(), rel=4e-3)


@pytest.mark.parametrize("sheet", [A100, H100], ids=["a100", "h100"])
def test_what_a_data_sheet_says_of_its_error_is_that_of_laboratories_a_fit_did_not_see(sheet, unseen):
    off = np.abs([e for run, e in zip(RUNS, unseen, strict=True) if run.sheet.accuracy == sheet.accuracy])
    told = (len(off), round(float(np.median(off)), 3), round(float(np.quantile(off, 0.95)), 3))
    assert (*told, sheet.accuracy.hardware) == dataclasses.astuple(sheet.accuracy)
    assert f"against {len(off)} published runs on {sheet.accuracy.hardware}" in sheet.source


def test_predictions_agree_with_published_runs_seen_or_not(unseen):
    seen = np.abs(error_fracs(RUNS))
    assert np.median(seen) < 0.03
    assert np.quantile(seen, 0.9) < 0.09
    assert np.median(np.abs(unseen)) < 0.05
    assert np.quantile(np.abs(unseen), 0.9) < 0.10
    found = kinds(RUNS)
    assert {name for name, most in BY_KIND.items() if np.median(seen[found[name]]) > most} == set()


def test_the_faster_of_two_published_layouts_is_predicted_to_be_it(unseen):
    measured_s = np.array([1 / run.tokens_per_s_per_gpu for run in RUNS])
    for errors in (error_fracs(RUNS), unseen):
        found = choices(RUNS, (1 + errors) * measured_s)
        assert sum(choice.is_right for choice in found) > 0.95 * len(found)
        assert np.median([abs(choice.predicted / choice.measured - 1) for choice in found]) < 0.08


def test_a_table_with_known_constants_gives_them_back():
    known = {name: value * 1.1 for name, value in PRIORS.items()}
    made = [dataclasses.replace(run, tokens_per_s_per_gpu=1 / seconds_of(run, known)) for run in RUNS]
    assert np.abs(error_fracs(made, fit_runs(made))).max() < 0.02
    assert fit_runs(made[:1])["matmul A100"] == pytest.approx(PRIORS["matmul A100"]), "no run of that device"


def test_kernels_of_2023_are_slower_than_those_that_plans_are_made_with():
    for sheet, frac in FLASH_1_FRACS.items():
        assert frac < sheet.attention_frac


def test_layouts_cost_what_they_add():
    """Against the same run on one replica: messages between tensor-parallel ranks, a bubble, gathers."""
    run = dataclasses.replace(RUNS[0], gpus=8, grad_accum=4, sharding="none", recompute="none")
    plain = parts_of(run)
    piped = parts_of(dataclasses.replace(run, pp=4))
    assert piped.attention_s == pytest.approx(plain.attention_s * (1 + 3 / 4))
    head_s = 6 * run.vocab * run.hidden / run.sheet.peak_bf16_flops
    assert piped.matmul_s - 4 * head_s == pytest.approx((plain.matmul_s - head_s) * (1 + 3 / 4)), "the last stage's"
    cut = parts_of(dataclasses.replace(run, tp=4, tp_exchange="block"))
    assert cut.matmul_s == pytest.approx(plain.matmul_s)
    assert cut.hidden_s == pytest.approx(plain.hidden_s)
    messages_s = [
        parts_of(dataclasses.replace(run, tp=4, tp_exchange=word)).rest_s - plain.rest_s
        for word in ("block-async", "block", "megatron", "projection")
    ]
    assert messages_s == sorted(messages_s)
    assert messages_s[0] == pytest.approx(messages_s[1] / 2)
    whole = parts_of(dataclasses.replace(run, tp=4, tp_exchange="projection-all-reduce"))
    assert whole.hidden_s == pytest.approx(4 * plain.hidden_s)
    again = parts_of(dataclasses.replace(run, recompute="full"))
    assert again.hidden_s == pytest.approx(plain.hidden_s * 4 / 3)
    wide = parts_of(dataclasses.replace(run, head_dim=2 * run.head_dim))
    assert wide.attention_s == pytest.approx(2 * plain.attention_s)


def test_replicas_exchange_by_how_and_where_they_are_shared_out():
    run = dataclasses.replace(RUNS[0], gpus=64, grad_accum=4, sharding="fsdp")
    fsdp = parts_of(run).sharding_s
    assert parts_of(dataclasses.replace(run, scatter="step")).sharding_s == pytest.approx(fsdp * 5 / 8)
    assert parts_of(dataclasses.replace(run, gpus=32)).sharding_s < fsdp
    alone = parts_of(dataclasses.replace(run, tp=8, tp_exchange="block")).sharding_s
    assert alone == pytest.approx(8 * fsdp * (7 / 8) / (63 / 64)), "one adapter for each"
    piped = parts_of(dataclasses.replace(run, pp=2)).sharding_s
    assert piped == pytest.approx(fsdp * 5 / 4 * (31 / 32) / (63 / 64)), "a microbatch of a stage gathers, too"
    assert parts_of(dataclasses.replace(run, sharding="zero1")).sharding_s < fsdp / 4
    copies = dataclasses.replace(run, sharding="none")
    sheet, params = run.sheet, run.spec.num_params
    summed_s = 4 * moved_frac(ALL_REDUCE, 64) * params / (8 * sheet.network_bytes_per_s)
    assert parts_of(copies).sharding_s == pytest.approx(summed_s / (4 * run.micro_batch * run.seq_len))
    hsdp = parts_of(dataclasses.replace(run, sharding="hsdp")).sharding_s
    in_node = parts_of(dataclasses.replace(run, gpus=8)).sharding_s
    summed_s = 4 * moved_frac(ALL_REDUCE, 8) * params / (8 * sheet.network_bytes_per_s)
    assert hsdp - in_node == pytest.approx(summed_s / (4 * run.micro_batch * run.seq_len)), "shards, once a step"
    pair = dataclasses.replace(run, gpus=2, gpus_per_node=4)
    assert parts_of(pair).sharding_s == pytest.approx(
        3 * parts_of(dataclasses.replace(pair, gpus_per_node=8)).sharding_s
    )


def test_a_table_that_cannot_be_read_says_where(tmp_path):
    text = TABLE.read_text()
    lines = text.splitlines()
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([lines[0].replace("seq_len", "length"), *lines[1:]]))
    with pytest.raises(CostError, match="no column `seq_len`"):
        read_runs(path)
    path.write_text("\n".join([*lines[:3], lines[3].replace(",tied,", ",bound,")]))
    with pytest.raises(CostError, match="embeddings `bound`"):
        read_runs(path)
    for right, wrong, told in (
        (",fsdp,", ",fsdp3,", "sharding `fsdp3`"),
        (",64,8,8,4,", ",64,8,0,4,", "micro_batch 0"),
        (",no,none,", ",no,block,", "tp 1 with tp_exchange `block`"),
        (",2048,", ",two thousand,", "two thousand"),
    ):
        path.write_text(text.replace(right, wrong, 1))
        with pytest.raises(CostError, match=told) as caught:
            read_runs(path)
        assert caught.value.where == f"{path}:2"


def test_choices_are_pairs_of_one_laboratory_model_and_device():
    one = RUNS[0]
    slow, alike = (dataclasses.replace(one, tokens_per_s_per_gpu=one.tokens_per_s_per_gpu * x) for x in (0.5, 1.04))
    others = [dataclasses.replace(slow, source="another/one"), dataclasses.replace(slow, model="another")]
    (found,) = choices([one, slow, *others], np.array([1.0, 1.5, 1.0, 1.0]))
    assert (found.measured, found.predicted) == (2.0, 1.5)
    assert found.is_right
    assert not choices([one, alike], np.array([1.0, 2.0]))
    (wrong,) = choices([slow, one], np.array([1.0, 1.5]))
    assert not wrong.is_right


def test_kinds_of_runs_cover_all_and_keep_layouts_apart():
    flat = dataclasses.replace(RUNS[0], gpus=8, tp=1, pp=1, compile="no")
    runs = [flat, dataclasses.replace(flat, compile="yes"), dataclasses.replace(flat, tp=2),
            dataclasses.replace(flat, tp=2, pp=2)]  # fmt: skip
    found = kinds(runs)
    names = ("eager, tp 1", "compiled, tp 1", "tp > 1", "pp > 1")
    assert np.array([found[name] for name in names]).tolist() == np.eye(4, dtype=bool).tolist()
    assert [sum(chosen) for name, chosen in found.items() if name not in names] == [4]


def test_what_is_printed_names_every_laboratory_and_constant(unseen):
    lines = list(check_lines(RUNS, error_fracs(RUNS), unseen))
    assert lines[0].startswith("all: 88 runs")
    assert {run.laboratory for run in RUNS} < {line.partition(":")[0] for line in lines}
    assert [line.partition(":")[0] for line in lines[-2:]] == ["choices", "choices, unseen"]
    assert len(list(fit_lines(RUNS))) == len(PRIORS)


def test_what_plans_are_told_of_published_runs_is_so(unseen):
    of = {}
    for run, error in zip(RUNS, unseen.tolist(), strict=True):
        of.setdefault((run.model, run.laboratory, run.gpus, run.tp, run.pp), []).append((run, error))
    for told in published.RUNS:
        found = of[told.model, told.laboratory, told.num_gpus, told.tp, told.pp]
        assert any(
            run.device.startswith(told.device)
            and round(error, 3) == told.error_frac
            and run.spec.num_params == pytest.approx(told.num_params, rel=0.02)
            for run, error in found
        ), told
    for kind, (num_runs, frac) in published.RANGES.items():
        off = np.abs([e for run, e in zip(RUNS, unseen, strict=True) if published.kind_of(run) == kind])
        assert (len(off), round(float(np.quantile(off, 0.9)), 3)) == (num_runs, frac)


FLAT = dataclasses.replace(
    next(r for r in RUNS if r.model == "llama-3-8b" and r.sheet is H200 and r.tp == 1), sharding="fsdp2", gpus=8,
    gpus_per_node=8, recompute="none", compile="yes", seq_len=8192, micro_batch=1, grad_accum=1, scatter="microbatch",
)  # fmt: skip
TOWER = {
    "vision_layers": 24, "vision_hidden": 1024, "vision_heads": 16, "vision_intermediate": 4096,
    "vision_tokens": 16_384, "vision_item_tokens": 4096,
}  # fmt: skip


@pytest.mark.parametrize("trains", ["yes", "no"])
def test_a_tower_takes_what_the_planner_says_of_its_layers(trains):
    run = dataclasses.replace(FLAT, **TOWER, vision_trains=trains)
    frozen = ["vision"] if trains == "no" else []
    more_s = seconds_of(run) - seconds_of(FLAT)
    tables = analytic_cost_tables(
        [run.vision], H200, profile_key="", program=COMPILED, recompute=[False], frozen=frozen
    )
    load, kept = (4, 16_384, 4 * 4096**2), FLAT.seq_len
    layer = float(evaluate(tables[0].forward_s, load, 1, False))
    if trains == "yes":
        layer += float(evaluate(tables[0].backward_s, load, 1, False))
    sharding = known_sharding(run) - known_sharding(FLAT)
    assert (more_s - sharding) * kept == pytest.approx(24 * layer, rel=0.02)


def known_sharding(run):
    """Seconds of a token in gathers, scatters and the optimizer, which a layer's table has not."""
    parts = parts_of(run)
    return package_constants()["exposed"] * parts.sharding_s + parts.rest_s


def test_adapters_leave_out_the_gradients_of_weights_and_their_messages():
    run = dataclasses.replace(FLAT, lora_rank=16)
    spec = FLAT.spec
    matmuls = parts_of(FLAT).matmul_s - parts_of(run).matmul_s
    of_adapters = 6 * run.num_adapter_params / H200.peak_bf16_flops
    assert matmuls + of_adapters == pytest.approx(2 * (spec.num_params - spec.vocab_size * spec.hidden_size)
                                                  / H200.peak_bf16_flops, rel=1e-6)  # fmt: skip
    assert parts_of(run).sharding_s == pytest.approx(parts_of(FLAT).sharding_s / 2, rel=0.02), "4 of 8 bytes"
    assert parts_of(run).rest_s < parts_of(FLAT).rest_s


def test_experts_are_gathered_whole_and_used_in_part_and_ranks_that_share_them_exchange_rows():
    dense = dataclasses.replace(FLAT, intermediate=2048)
    moe = dataclasses.replace(dense, experts=64, active_experts=4)
    same = dataclasses.replace(dense, intermediate=4 * 2048)
    assert parts_of(moe).matmul_s == pytest.approx(parts_of(same).matmul_s)
    assert parts_of(moe).sharding_s > 5 * parts_of(same).sharding_s
    shared = dataclasses.replace(moe, ep=8)
    assert parts_of(shared).sharding_s < parts_of(moe).sharding_s / 4
    assert 1 < parts_of(shared).matmul_s / parts_of(moe).matmul_s < 1.2
    assert parts_of(shared).rest_s > parts_of(moe).rest_s


def test_ranks_that_share_a_sequence_gather_for_fewer_tokens_each():
    whole, cut = FLAT, dataclasses.replace(FLAT, cp=4)
    assert parts_of(cut).sharding_s == pytest.approx(4 * parts_of(whole).sharding_s)
    assert parts_of(cut)[:3] == pytest.approx(parts_of(whole)[:3])
    assert parts_of(cut).rest_s > parts_of(whole).rest_s


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"vision_layers": 2}, "a vision tower without vision_heads"),
        ({"experts": 8}, "0 active of 8 experts"),
        ({"experts": 8, "active_experts": 2, "ep": 3}, "2 active of 8 experts on 3 ranks"),
        ({"cp": 3}, "cp 3"),
        ({"lora_rank": -1}, "lora_rank -1: must be positive"),
    ],
)
def test_columns_that_contradict_each_other_are_refused_with_the_line(tmp_path, column, said):
    row = dataclasses.asdict(dataclasses.replace(FLAT, **column))
    path = tmp_path / "runs.csv"
    path.write_text(",".join(row) + "\n" + ",".join(str(value).replace(",", ";") for value in row.values()) + "\n")
    with pytest.raises(CostError) as error:
        read_runs(path)
    assert said in str(error.value)
    assert "runs.csv:2" in str(error.value)


def test_trainings_in_fp8_are_predicted_and_gain_what_they_have_gained():
    runs = read_runs(IN_FP8)
    assert sum(run.fp8 != FP8_OFF for run in runs) == 9
    assert np.abs(error_fracs(runs)).max() < 0.10
    of_one_page = [run for run in runs if run.laboratory == "pytorch/ao"]
    found = choices(of_one_page, np.array([seconds_of(run) for run in of_one_page]))
    assert len(found) == 3, "bfloat16, tensorwise, rowwise"
    assert max(abs(choice.predicted / choice.measured - 1) for choice in found) < 0.01
    # Of another page in bfloat16, in the tables of 2024 and later.
    plain = [r for r in RUNS if "202412" in r.source and r.compile == "yes"]
    for slow in plain:
        (fast,) = (r for r in runs if "202412" in r.source and (r.gpus, r.seq_len) == (slow.gpus, slow.seq_len))
        gain = fast.tokens_per_s_per_gpu / slow.tokens_per_s_per_gpu
        assert seconds_of(slow) / seconds_of(fast) == pytest.approx(gain, rel=0.03)
    assert plain
