import dataclasses

import pytest

from dflop.cost.devices import A100, A100_40, B200, H100, H200
from dflop.cost.published import RANGES, RUNS, certainty, kind_of
from dflop.records import ParallelSpec
from tests.cost.test_analytic import QWEN_7B


@pytest.mark.parametrize(
    ("device", "parallel", "said"),
    [
        (A100, ParallelSpec(1, 1, 8), "mpt-7b on 8 A100 (mosaicml/llm-foundry), seconds off by +0 %"),
        (A100_40, ParallelSpec(1, 1, 8), "mpt-7b on 8 A100"),
        (H100, ParallelSpec(8, 1, 8), "llama-3-8b on 64 H100, tp 8 (pytorch/torchtitan), seconds off by -9 %"),
        (H200, ParallelSpec(4, 2, 1), "llama-13b-kempner on 32 H200, tp 4, pp 2"),
        (B200, ParallelSpec(1, 1, 8), "llama-3-8b on 8 B200"),
    ],
)
def test_the_nearest_run_is_of_the_device_the_kind_of_layout_and_the_size(device, parallel, said):
    _, text = certainty(QWEN_7B, parallel, device, 10.0)
    assert f"nearest: {said}" in text
    assert "share samples" not in text


def test_where_no_run_is_near_that_is_said():
    huge = dataclasses.replace(QWEN_7B, layers=((QWEN_7B.kinds[0], 2800),))
    for llm, parallel, device in (
        (QWEN_7B, ParallelSpec(1, 4, 2), H100),
        (QWEN_7B, ParallelSpec(2, 1, 4), B200),
        (huge, ParallelSpec(1, 1, 8), A100),
    ):
        assert certainty(llm, parallel, device, 10.0)[1].endswith("none of this size and device is near")
    assert "none of them has ranks that share samples" in certainty(QWEN_7B, ParallelSpec(1, 1, 1, 8), H100, 10.0)[1]


def test_the_range_is_of_the_kind_of_layout():
    text, _ = certainty(QWEN_7B, ParallelSpec(2, 2, 2), H100, 10.0)
    assert text == "8.95 s to 11.33 s"
    assert {kind_of(run) for run in RUNS} == RANGES.keys()
