"""Cross entropy over parts of a vocabulary equals torch's over the whole, however it is cut; ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflop.parallel.vocab import vocab_cross_entropy, vocab_share


class Exchange:
    """Ranks as threads that wait for one another; every rank must exchange tensors of the same shape and type."""

    def __init__(self, degree):
        self.slots, self.sizes = [None] * degree, []
        self.barrier = threading.Barrier(degree, timeout=30)

    def of(self, rank):
        def reduce(values, *, maximum=False):
            self.slots[rank] = values
            self.barrier.wait()
            assert {(v.shape, v.dtype) for v in self.slots} == {(values.shape, torch.float32)}
            stacked = torch.stack(self.slots)
            self.barrier.wait()
            if rank == 0:
                self.sizes.append(values.numel())
            return stacked.amax(dim=0) if maximum else stacked.sum(dim=0)

        return reduce


def in_parts(logits, targets, degree, grad=1.0):
    """(loss on every rank, gradient put together again, numbers exchanged per call)."""
    exchange = Exchange(degree)

    def run(rank):
        first, end = vocab_share(logits.shape[1], rank, degree)
        part = logits[:, first:end].clone().requires_grad_()
        loss = vocab_cross_entropy(part, targets, first, exchange.of(rank))
        (loss * grad).backward()
        return loss.detach(), part.grad

    with ThreadPoolExecutor(degree) as pool:
        losses, gradients = zip(*pool.map(run, range(degree)), strict=True)
    return losses, torch.cat(gradients, dim=1), exchange.sizes


def whole(logits, targets, grad=1.0):
    logits = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
    (loss * grad).backward()
    return loss.detach(), logits.grad


@st.composite
def problems(draw):
    degree = draw(st.integers(1, 5))
    vocab, num_tokens = draw(st.integers(degree, 40)), draw(st.integers(0, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Large scales make one logit dominate and the others' exponentials vanish.
    scale, offset = draw(st.sampled_from([0.0, 1.0, 30.0, 1e4])), draw(st.sampled_from([0.0, -500.0, 500.0]))
    logits = scale * torch.randn(num_tokens, vocab, generator=generator) + offset
    return logits, torch.randint(vocab, (num_tokens,), generator=generator), degree, draw(st.sampled_from([1.0, -0.3]))


@given(problems())
def test_loss_and_gradient_equal_those_of_the_whole_vocabulary(problem):
    logits, targets, degree, grad = problem
    want, want_gradient = whole(logits, targets, grad)
    losses, gradient, sizes = in_parts(logits, targets, degree, grad)
    for loss in losses:
        assert torch.equal(loss, losses[0])
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5 * len(targets))
    # A difference of large logits is itself rounded: 1e4 has a spacing of 1e-3.
    largest = float(logits.abs().max()) if logits.numel() else 0.0
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-6 + 2e-7 * largest)
    assert sizes == [len(targets), 2 * len(targets)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 3000, generator=generator).to(dtype)
    targets = torch.randint(3000, (50,), generator=generator)
    want, want_gradient = whole(logits, targets)
    losses, gradient, _ = in_parts(logits, targets, 3)
    torch.testing.assert_close(losses[0], want, rtol=1e-6, atol=0.0)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, want_gradient)
    logits[1, 4] = float("nan")
    assert all(loss.isnan() for loss in in_parts(logits, targets, 3)[0]), "a lost logit is a lost loss"


@given(st.integers(1, 1000), st.integers(1, 64))
def test_shares_cover_the_vocabulary_in_order_and_are_even(vocab, degree):
    shares = [vocab_share(vocab, rank, degree) for rank in range(degree)]
    assert [first for first, _ in shares] == [0, *(end for _, end in shares[:-1])]
    assert shares[-1][1] == vocab
    sizes = [end - first for first, end in shares]
    assert max(sizes) - min(sizes) <= 1
