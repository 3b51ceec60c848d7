"""Encoder items dealt over processes: every gradient is that of no dealing, whoever has media."""

import pytest
import torch

from tests.balance.ranks import IMAGES, VIDEOS, step, without_dealing
from tests.train.ranks import run_ranks

CASES = [
    ("qwen2_5_vl", 2, "ddp", IMAGES, False, 1.0),
    ("qwen2_5_vl", 4, "fsdp2", VIDEOS, False, 1.0),
    ("qwen3_vl", 4, "ddp", VIDEOS, False, 1.0),
    ("qwen3_vl", 4, "fsdp2", IMAGES, True, 1.0),
    ("qwen3_5", 2, "fsdp2", IMAGES, False, 1.0),
    ("qwen2_5_vl", 2, "fsdp2", IMAGES, False, 1e9),
    ("qwen3_5", 2, "packed", VIDEOS, False, 1.0),
    ("llava", 4, "ddp", IMAGES, False, 1.0),
]


@pytest.mark.parametrize(("kind", "num_ranks", "wrapper", "media", "frozen", "least"), CASES)
def test_gradients_are_those_of_no_dealing(kind, num_ranks, wrapper, media, frozen, least, tmp_path):
    expected = without_dealing(kind, num_ranks, media, frozen)
    for found, gain in run_ranks(step, num_ranks, tmp_path, kind, wrapper, media, frozen, least):
        assert (gain > 1.0) == (least == 1.0), "what gains too little stays where it is"
        assert found.keys() == expected.keys()
        largest = max(float(g.norm()) for g in expected.values())
        for name, exact in expected.items():
            assert float((found[name] - exact).norm()) <= 1e-6 * largest, name
            assert torch.isfinite(found[name]).all()
