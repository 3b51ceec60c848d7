import dataclasses

import numpy as np
import pytest

from dflop.cost.devices import A100, H100
from dflop.errors import CostError
from tests.bench.published import (
    TABLE,
    constants_of,
    error_fracs,
    fit_runs,
    parts_of,
    read_runs,
    seconds_of,
    summary,
    unseen_errors,
)

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
