import dataclasses

import numpy as np
import pytest

from dflop.cost.devices import A100, H100
from dflop.errors import CostError
from tests.bench.published import (
    TABLE,
    UNSEEN,
    constants_of,
    error_fracs,
    fit_runs,
    parts_of,
    read_runs,
    seconds_of,
    summary,
    unseen_errors,
)
from tests.bench.published_checks import check_lines, choices, kinds

RUNS = read_runs()


def test_the_constants_of_the_package_are_the_fit_of_its_table():
    fit = fit_runs(RUNS)
    for sheet in (A100, H100):
        assert fit[sheet.name] == pytest.approx(constants_of(sheet), rel=3e-3)


@pytest.mark.parametrize("sheet", [A100, H100], ids=["a100", "h100"])
def test_predictions_agree_with_published_runs_seen_or_not(sheet):
    runs = [run for run in RUNS if run.sheet == sheet]
    unseen = np.abs([e for run, e in zip(RUNS, unseen_errors(RUNS), strict=True) if run.sheet == sheet])
    seen = np.abs(error_fracs(runs))
    assert np.median(seen) < 0.05
    assert np.median(unseen) < 0.06
    assert np.quantile(unseen, 0.9) < 0.15
    told = (len(runs), round(float(np.median(unseen)), 3), round(float(np.quantile(unseen, 0.95)), 3))
    assert (*told, sheet.name[:4]) == dataclasses.astuple(sheet.accuracy)
    assert f"against {len(runs)} published runs on {sheet.name[:4]}" in sheet.source


def test_a_table_with_known_constants_gives_them_back():
    fit = fit_runs([dataclasses.replace(run, tokens_per_s_per_gpu=1 / seconds_of(run)) for run in RUNS])
    for sheet in (A100, H100):
        assert fit[sheet.name] == pytest.approx(constants_of(sheet))


def test_layouts_cost_what_they_add():
    """Against the same run on one replica: messages between tensor-parallel ranks, a bubble, gathers."""
    run = dataclasses.replace(RUNS[0], gpus=8, grad_accum=4, sharding="none", recompute="none")
    plain = parts_of(run)
    piped = parts_of(dataclasses.replace(run, pp=4))
    assert piped.attention_s == pytest.approx(plain.attention_s * (1 + 3 / 4))
    cut = parts_of(dataclasses.replace(run, tp=4))
    assert cut.matmul_s == pytest.approx(plain.matmul_s)
    assert cut.hidden_s == pytest.approx(plain.hidden_s)
    assert cut.rest_s > plain.rest_s
    sharded = parts_of(dataclasses.replace(run, sharding="fsdp"))
    assert plain.sharding_s == 0 < sharded.sharding_s
    assert parts_of(dataclasses.replace(run, gpus=16, sharding="fsdp")).sharding_s > sharded.sharding_s
    again = parts_of(dataclasses.replace(run, recompute="full"))
    assert again.hidden_s == pytest.approx(plain.hidden_s * 4 / 3)


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
    for right, wrong, told in ((",fsdp,", ",fsdp3,", "sharding `fsdp3`"), (",64,8,4,", ",64,0,4,", "micro_batch 0")):
        path.write_text(text.replace(right, wrong, 1))
        with pytest.raises(CostError, match=told) as caught:
            read_runs(path)
        assert caught.value.where == f"{path}:2"
    path.write_text(text.replace(",2048,", ",two thousand,", 1))
    with pytest.raises(CostError, match="two thousand") as caught:
        read_runs(path)
    assert caught.value.where == f"{path}:2"


def test_a_table_of_one_model_says_nothing_of_models_it_did_not_see():
    lines = list(summary([run for run in RUNS if run.model == "mpt-7b"]))
    assert len(lines) == 5
    assert not any("nan" in line or "saw no run" in line for line in lines)


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


def test_runs_of_no_fit_are_read_and_summed_up():
    runs = read_runs(UNSEEN)
    lines = list(check_lines(runs, error_fracs(runs)))
    assert not {run.source for run in runs} & {run.source for run in RUNS}
    assert any(line.startswith("pp > 1: 2 runs") for line in lines)
    assert lines[-1].startswith("choices: ")
