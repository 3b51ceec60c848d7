"""Packed attention written down plainly, and the comparison with it, for CPU and GPU tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from dflop.models import attention

# Segments of one length that are neighbours share a call; empty ones take part in none.
SEGMENTS = st.lists(st.integers(0, 9) | st.just(1), min_size=1, max_size=6).map(
    lambda lengths: [n for n in lengths for _ in range(2 if n % 3 == 2 else 1)]
)
HEADS = st.sampled_from([(2, 2), (4, 2), (4, 1)])
WINDOWS = st.sampled_from([(False, None), (True, None), (True, 1), (True, 3), (True, 20)])
"""(causal, sliding window)."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.04}


NOTHING = attention.ByHeads(0, 0, [], 1, lambda given: given, lambda given: given)


def tensors(lengths, heads, head_dim=8, seed=0, dtype=torch.float32, device="cpu"):
    """Query, key, value `[1, heads, tokens, head_dim]` and segment boundaries."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, h, sum(lengths), head_dim) for h in (heads[0], heads[1], heads[1])]
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in shapes
    )
    return query, key, value, torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def dense(query, key, value, cu_seqlens, *, causal, scale, window=None):
    """Softmax over the whole T x T score matrix with a block-diagonal mask; `[1, tokens, heads, head_dim]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    number = torch.arange(query.shape[2], device=query.device)
    segment = torch.bucketize(number, cu_seqlens[1:], right=True)
    allowed = segment[:, None] == segment[None, :]
    if causal:
        allowed = allowed.tril()
    if window is not None:
        allowed &= number[:, None] - number[None, :] < window
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def assert_equals_dense(
    lengths, heads, causal_window, scale, dtype, *, kernel="auto", device="cpu", head_dim=8, num_elsewhere=0
):
    """Values and gradients of packed attention equal those of dense attention in float64.

    Of the first segment another rank has the first `num_elsewhere` tokens.
    """
    causal, window = causal_window
    *inputs, cu_seqlens = tensors(lengths, heads, head_dim, dtype=dtype, device=device)
    of_keys = {}
    if num_elsewhere:
        there = [x[0, :, :num_elsewhere].transpose(0, 1) for x in inputs[1:]]
        there = torch.cat(there, dim=1)
        earlier = attention.Earlier(
            0, num_elsewhere, lambda given: torch.cat([given, there]), lambda _, most: there[-most:], NOTHING
        )
        of_keys = {"cu_seq_lens_k": cu_seqlens, "earlier": earlier}
    own = [x[:, :, num_elsewhere:] for x in inputs]
    got, weights = attention.packed_attention(
        torch.nn.Module(), *own, None, scaling=scale, is_causal=causal, sliding_window=window, kernel=kernel,
        cu_seq_lens_q=(cu_seqlens - num_elsewhere).clamp(min=0), **of_keys,
    )  # fmt: skip
    assert weights is None
    assert got.is_contiguous()
    assert got.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale = scale or head_dim**-0.5
    expected = dense(*exact, cu_seqlens, causal=causal, scale=scale, window=window)[:, num_elsewhere:]
    assert_close(got, expected, dtype)
    weight = torch.linspace(-1, 1, max(got.numel(), 1), dtype=torch.float64, device=device)[: got.numel()].view_as(got)
    (got.double() * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, reference in zip(inputs, exact, strict=True):
        assert_close(mine.grad, reference.grad, dtype)


def assert_close(got, expected, dtype):
    """Equal up to the type's rounding of the largest value: a gradient is a difference of numbers of that size."""
    largest = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype] * largest, rtol=TOLERANCE[dtype])
