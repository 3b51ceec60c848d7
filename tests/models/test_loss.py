"""The loss by chunks equals torch's of all logits, however tokens and vocabulary are cut; ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dflop.models import loss_size
from dflop.models.loss import head_loss
from dflop.parallel.tensor import vocab_share
from tests.train.engine_bytes import peak_of


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


def in_parts(hidden, weight, bias, targets, degree, num_tokens):
    """(loss on every rank, gradients put together again, numbers exchanged per call)."""
    exchange = Exchange(degree)

    shares = [vocab_share(len(weight), rank, degree) for rank in range(degree)]
    sizes = [end - first for first, end in shares]
    assert sum(sizes) == len(weight) >= degree * max(sizes) - degree + 1, "as even as can be"

    def run(rank):
        first, end = shares[rank]
        own = leaves(hidden, weight[first:end], bias[first:end])
        loss = head_loss(*own, targets, num_tokens, first=first, reduce=exchange.of(rank))
        (2 * loss).backward()
        return loss.detach(), [x.grad for x in own]

    with ThreadPoolExecutor(degree) as pool:
        losses, gradients = zip(*pool.map(run, range(degree)), strict=True)
    of_hidden, of_weight, of_bias = zip(*gradients, strict=True)
    return losses, (sum(of_hidden), torch.cat(of_weight), torch.cat(of_bias)), exchange.sizes


def leaves(*given):
    found = [x.clone().requires_grad_() for x in given]
    for parameter in found[1:]:
        parameter.grad_dtype = torch.float32
    return found


def plain(hidden, weight, bias, targets, num_tokens):
    own = leaves(hidden, weight, bias)
    loss = F.cross_entropy(F.linear(*own).float(), targets, reduction="sum") / num_tokens
    (2 * loss).backward()
    return loss.detach(), [x.grad for x in own]


@st.composite
def problems(draw):
    degree = draw(st.integers(1, 5))
    vocab, num_tokens = draw(st.integers(degree, 40)), draw(st.integers(0, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Large scales make one logit dominate and the others' exponentials vanish.
    scale, offset = draw(st.sampled_from([0.0, 1.0, 30.0, 1e4])), draw(st.sampled_from([0.0, -500.0, 500.0]))
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((num_tokens, 4), (vocab, 4), vocab))
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return (hidden, scale * weight, bias + offset), targets, degree, draw(st.sampled_from([1, 300]))


@given(problems(), st.integers(1, 13), st.integers(4, 400))
def test_loss_and_gradients_equal_those_of_all_logits(problem, chunk_tokens, block_bytes):
    given, targets, degree, num_tokens = problem
    want, want_gradients = plain(*given, targets, num_tokens)
    with patch.multiple(loss_size, CHUNK_TOKENS=chunk_tokens, BLOCK_BYTES=block_bytes):
        losses, gradients, sizes = in_parts(*given, targets, degree, num_tokens)
    for loss in losses:
        assert torch.equal(loss, losses[0])
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5 * len(targets))
    # A difference of large logits is itself rounded: 1e4 has a spacing of 1e-3.
    error = (1e-6 + 3e-7 * max(F.linear(*given).abs().flatten().tolist(), default=0.0)) / num_tokens
    factors = (given[1].abs().sum(), given[0].abs().sum(), len(targets))
    for found, wanted, factor in zip(gradients, want_gradients, factors, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2 * error * float(factor))
    chunks = [len(part) for part in targets.split(chunk_tokens)] if len(targets) else []
    assert sizes == [n for chunk in chunks for n in (chunk, 2 * chunk)]


def test_bfloat16_is_as_near_to_float32_as_all_logits_at_once():
    generator = torch.Generator().manual_seed(0)
    shapes, num_tokens = ((150, 64), (3000, 64), (3000,)), 1000
    given = [torch.randn(shape, generator=generator).bfloat16() / 4 for shape in shapes]
    targets = torch.randint(3000, (150,), generator=generator)
    (_, exact), (loss, usual) = (plain(*of, targets, num_tokens) for of in ([x.float() for x in given], given))
    with patch.multiple(loss_size, CHUNK_TOKENS=40, PART_BYTES=100_000):
        losses, gradients, _ = in_parts(*given, targets, 1, num_tokens)
    torch.testing.assert_close(losses[0], loss, rtol=1e-6, atol=0.0)
    for found, theirs, true in zip(gradients, usual, exact, strict=True):
        assert (found.float() - true).norm() <= 1.02 * (theirs.float() - true).norm()
    given[0][1, 4] = float("nan")
    assert all(loss.isnan() for loss in in_parts(*given, targets, 3, 1)[0]), "a lost logit is a lost loss"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trains", [True, False])
def test_memory_is_that_of_a_chunk_and_of_gradients_that_are_wanted(trains, dtype, monkeypatch):
    for name, value in (("CHUNK_TOKENS", 512), ("BLOCK_BYTES", 100_000), ("PART_BYTES", 32_000)):
        monkeypatch.setattr(loss_size, name, value)
    hidden = torch.randn(2000, 32, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(4000, 32, dtype=dtype), requires_grad=trains)
    weight.grad_dtype = torch.float32
    targets = torch.zeros(2000, dtype=torch.int64)
    loss_bytes = loss_size.loss_peak_bytes(2000.0, 4000, 32, dtype.itemsize, trains=trains)
    measured = peak_of(lambda: head_loss(hidden.clone(), weight, None, targets, 1).backward())
    assert measured == pytest.approx(loss_bytes + hidden.nbytes, rel=0.05)
    assert measured < 1.5 * 2000 * 4000, "bytes a logit, of which all logits at once take 12"
    assert (weight.grad is not None) == trains
    with torch.no_grad():
        of_chunk = peak_of(lambda: head_loss(hidden, weight, None, targets, 1))
    assert of_chunk == pytest.approx(dtype.itemsize * 512 * 4000 + 100_000 * (4 // dtype.itemsize), rel=0.06)
