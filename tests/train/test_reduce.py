"""One rank alone; sums over replicas and tied ends are checked by test_parity, gradients and norm alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.records import LLM
from tests.train.rank import Rank
from tests.train.synthetic import family, make_plan, tiny_model

PLAN = make_plan({LLM: (1, 1)}, num_microbatches=1)


@pytest.fixture
def reducer_and_stage(one_rank):
    it = Rank(0, PLAN, family(), tiny_model())
    reducer, generator = it.reducer, torch.Generator().manual_seed(0)
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
    norm, loss, _, norm_of, _ = reducer.totals(1.25)
    assert loss == 1.25
    assert norm == pytest.approx(float(expected_norm), rel=1e-5)
    assert norm_of == {"llm": norm}
    reducer.clip(norm, max_norm)
    for copied, (name, p) in zip(reference, stage.names.items(), strict=True):
        expected = torch.zeros_like(p) if copied.grad is None else copied.grad
        torch.testing.assert_close(p.grad, expected, msg=name)


def test_gradients_of_bfloat16_weights_accumulate_in_float32(one_rank):
    it = Rank(0, PLAN, family(), tiny_model().bfloat16())
    reducer = it.reducer
    name, p = next(iter(it.names.items()))
    small = 2.0**-10  # next to 1, too small for the 8 bits of a bfloat16's mantissa
    for gradient in (1.0, small, small):
        (p * torch.tensor(gradient, dtype=torch.bfloat16)).sum().backward()
    reducer.reduce()
    assert p.grad.dtype == torch.float32, name
    assert torch.equal(p.grad, torch.full(p.shape, 1.0 + 2 * small))
    assert reducer.totals(0.0)[0] == pytest.approx(p.numel() ** 0.5 * (1.0 + 2 * small))


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.num_elements = max(self.num_elements, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_takes_no_copy_of_a_gradient_and_is_as_exact_as_in_double(one_rank, dtype):
    """A sum of this many float32 squares in one go is wrong in the fifth digit on a CPU."""
    it = Rank(0, PLAN, family(), tiny_model())
    reducer, name = it.reducer, next(name for name in it.names if name.endswith("embed_tokens.weight"))
    shape, generator = (2048, 1024), torch.Generator().manual_seed(0)
    it.names[name].grad = None
    it.names[name].grad_dtype = dtype
    it.names[name].data = torch.empty(shape)
    it.names[name].grad = torch.randn(shape, generator=generator).mul(1e-3).to(dtype)
    with LargestResult() as mode:
        norm = reducer.totals(0.0).norm
    squares = [p.grad.double().pow(2).sum() for p in it.names.values() if p.grad is not None]
    assert norm == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-7)
    assert mode.num_elements < shape[0] * shape[1] // 100
