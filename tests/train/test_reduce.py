"""One rank alone; sums over replicas and tied ends are checked by test_parity, gradients and norm alike."""

from __future__ import annotations

import copy

import pytest
import torch

from dflop.records import LLM
from tests.train.rank import Rank
from tests.train.synthetic import family, make_plan, tiny_model

PLAN = make_plan({LLM: (1, 1)}, num_microbatches=1)


@pytest.fixture
def reducer_and_stage(one_rank):
    it = Rank(0, PLAN, family(), tiny_model())
    reducer, generator = it.reducer(), torch.Generator().manual_seed(0)
    for n, p in it.names.items():
        if not n.endswith("bias"):
            p.grad.copy_(torch.randn(p.shape, generator=generator))
    return reducer, it.stages[0]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torch(reducer_and_stage, max_norm):
    """What has no gradient gets zeros."""
    reducer, stage = reducer_and_stage
    reference = copy.deepcopy(list(stage.names.values()))
    for copied, p in zip(reference, stage.names.values(), strict=True):
        copied.grad = None if p.grad is None else p.grad.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    reducer.reduce()
    norm, loss, _ = reducer.totals(1.25)
    assert loss == 1.25
    assert norm == pytest.approx(float(expected_norm), rel=1e-5)
    reducer.clip(norm, max_norm)
    for copied, (name, p) in zip(reference, stage.names.items(), strict=True):
        expected = torch.zeros_like(p) if copied.grad is None else copied.grad
        torch.testing.assert_close(p.grad, expected, msg=name)


def test_gradients_of_bfloat16_weights_accumulate_in_float32(one_rank):
    it = Rank(0, PLAN, family(), tiny_model().bfloat16())
    reducer = it.reducer()
    name, p = next(iter(it.names.items()))
    small = 2.0**-10  # next to 1, too small for the 8 bits of a bfloat16's mantissa
    for gradient in (1.0, small, small):
        (p * torch.tensor(gradient, dtype=torch.bfloat16)).sum().backward()
    reducer.reduce()
    assert p.grad.dtype == torch.float32, name
    assert torch.equal(p.grad, torch.full(p.shape, 1.0 + 2 * small))
    assert reducer.totals(0.0)[0] == pytest.approx(p.numel() ** 0.5 * (1.0 + 2 * small))
