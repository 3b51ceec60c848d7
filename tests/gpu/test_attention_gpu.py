"""The variable-length kernels against SDPA on each segment alone, in bf16."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from dflop.models import attention

LENGTHS = [1, 7, 128, 300]


def inputs(device, heads, kv_heads, head_dim=64):
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    q = torch.randn(1, heads, num_tokens, head_dim, device=device)
    k, v = (torch.randn(1, kv_heads, num_tokens, head_dim, device=device) for _ in range(2))
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    return q, k, v, cu


def reference(q, k, v, causal):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    parts = zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v)), strict=True)
    out = [F.scaled_dot_product_attention(*part, is_causal=causal) for part in parts]
    return torch.cat(out, dim=2).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("kernel", ["torch", "flash_attn"])
def test_packed_kernels_equal_separate_segments(cuda, monkeypatch, kernel, kv_heads, causal):
    if kernel == "torch":
        monkeypatch.setattr(attention, "_varlen_kernel", lambda: attention._torch_varlen)
    elif importlib.util.find_spec("flash_attn") is None:
        pytest.skip("no CUDA device with flash-attn installed")
    q, k, v, cu = inputs(cuda, 4, kv_heads)
    want = reference(q, k, v, causal)
    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    got, _ = attention.packed_attention(
        torch.nn.Module(), *half, None, scaling=64**-0.5, is_causal=causal, cu_seq_lens_q=cu
    )
    assert (got.float() - want).abs().max() < 0.03
    got.float().pow(2).sum().backward()
    for x in half:
        assert torch.isfinite(x.grad).all()
