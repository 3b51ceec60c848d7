from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.models import attention

SEGMENTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
HEADS = st.sampled_from([(2, 2), (4, 2), (4, 1)])


def tensors(lengths, heads, head_dim=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, h, sum(lengths), head_dim) for h in (heads[0], heads[1], heads[1])]
    query, key, value = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def dense(query, key, value, cu_seqlens, *, causal, scale, window=None):
    """Softmax over the whole T x T score matrix with a block-diagonal mask; `[1, tokens, heads, head_dim]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    segment = torch.bucketize(torch.arange(query.shape[2]), cu_seqlens[1:], right=True)
    allowed = segment[:, None] == segment[None, :]
    if causal:
        allowed = allowed.tril()
    if window is not None:
        number = torch.arange(query.shape[2])
        allowed &= number[:, None] - number[None, :] < window
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


WINDOWS = st.sampled_from([(False, None), (True, None), (True, 1), (True, 3), (True, 20)])


@given(SEGMENTS, HEADS, WINDOWS, st.sampled_from([None, 0.5]))
def test_equals_dense_masked_attention_with_its_gradients(lengths, heads, causal_window, scale):
    query, key, value, cu_seqlens = tensors(lengths, heads, dtype=torch.float64)
    causal, window = causal_window
    got, weights = attention.packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=scale, is_causal=causal, cu_seq_lens_q=cu_seqlens,
        sliding_window=window,
    )  # fmt: skip
    assert weights is None
    assert got.is_contiguous()
    scale = scale or query.shape[-1] ** -0.5
    expected = dense(query, key, value, cu_seqlens, causal=causal, scale=scale, window=window)
    torch.testing.assert_close(got, expected)
    weight = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    inputs = (query, key, value)
    for mine, reference in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference)


@given(SEGMENTS, HEADS)
def test_packing_changes_no_sample(lengths, heads):
    query, key, value, cu_seqlens = tensors(lengths, heads)
    packed, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=cu_seqlens)
    alone = [
        attention.packed_attention(torch.nn.Module(), *(x[:, :, a:b] for x in (query, key, value)), None)[0]
        for a, b in itertools.pairwise(cu_seqlens.tolist())
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_the_layer_says_whether_it_is_causal_unless_the_call_does():
    query, key, value, cu_seqlens = tensors([5], (2, 2))
    layer = torch.nn.Module()
    layer.is_causal = False
    free, causal = (
        attention.packed_attention(layer, query, key, value, None, cu_seq_lens_q=cu_seqlens, is_causal=flag)[0]
        for flag in (None, True)
    )
    torch.testing.assert_close(free, dense(query, key, value, cu_seqlens, causal=False, scale=8**-0.5))
    torch.testing.assert_close(causal, dense(query, key, value, cu_seqlens, causal=True, scale=8**-0.5))


def test_a_mask_is_refused_rather_than_ignored():
    query, key, value, _ = tensors([4], (2, 2))
    with pytest.raises(ValueError, match="attention_mask"):
        attention.packed_attention(torch.nn.Module(), query, key, value, torch.ones(1, 1, 4, 4))


def test_a_window_that_looks_both_ways_is_refused():
    query, key, value, _ = tensors([4], (2, 2))
    with pytest.raises(ValueError, match="causal layers only"):
        attention.packed_attention(torch.nn.Module(), query, key, value, None, is_causal=False, sliding_window=2)


def fake_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window):
    """What both variable-length kernels promise: `[tokens, heads, head_dim]` in and out."""
    assert all(x.is_contiguous() for x in (query, key, value))
    assert torch.equal(cu_q, cu_k)
    assert max_q == max_k == int((cu_q[1:] - cu_q[:-1]).max())
    heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
    before, behind = window
    keys = None if before < 0 else before + 1
    return dense(*heads_first, cu_q, causal=behind == 0, scale=scale, window=keys)[0]


@pytest.fixture
def kernel(request, monkeypatch):
    """The glue around one of the CUDA kernels, the kernel itself replaced by dense attention."""
    if request.param == "flash":
        module = types.ModuleType("flash_attn")

        def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal, window_size):
            assert dropout_p == 0
            assert causal == (window_size[1] == 0)
            return fake_kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window=window_size)

        module.flash_attn_varlen_func = flash
        monkeypatch.setitem(sys.modules, "flash_attn", module)
    else:
        from torch.nn.attention import varlen

        def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
            assert q.shape == k.shape, "torch's kernel knows no grouped heads"
            return fake_kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=q.shape[-1] ** -0.5, window=window_size)

        monkeypatch.setitem(sys.modules, "flash_attn", None)
        monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    attention._varlen_kernel.cache_clear()
    yield attention._varlen_kernel()
    attention._varlen_kernel.cache_clear()


@pytest.mark.parametrize("kernel", ["flash", "torch"], indirect=True)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (1, 0)])
def test_kernels_are_called_with_the_layout_they_want(kernel, heads, window):
    query, key, value, cu_seqlens = tensors([3, 1, 6], heads)
    got = kernel(query, key, value, cu_seqlens, 0.3, 0.0, window)
    keys = window[0] + 1 if window[0] >= 0 else None
    expected = dense(query, key, value, cu_seqlens, causal=window[1] == 0, scale=0.3, window=keys)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kernel", ["torch"], indirect=True)
def test_dropout_is_refused_where_the_kernel_has_none(kernel):
    query, key, value, cu_seqlens = tensors([3], (2, 2))
    with pytest.raises(ConfigError, match=r"no dropout \(attention_dropout is 0\.1\)"):
        kernel(query, key, value, cu_seqlens, 0.3, 0.1, (-1, 0))
