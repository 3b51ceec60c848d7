"""Exact block-diagonal causal attention over packed sequences, registered with transformers as `dflop_packed`.

A microbatch is one row of tokens holding several samples back to back; `cu_seq_lens_q` says where each starts. On
CUDA in half precision the variable-length kernels do this in one call (flash-attn when it can be imported, else
torch's varlen attention); elsewhere each segment gets its own SDPA call, so the cost is the sum of squares and never
the square of the sum, and no T x T mask is ever built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dflop.errors import ConfigError

PACKED = "dflop_packed"


def register() -> None:
    """Make `attn_implementation="dflop_packed"` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each packed segment.

    Args:
        module: Attention layer; its `is_causal` applies unless `is_causal` is given.
        query_BHTD: `[batch, heads, tokens, head_dim]`.
        key_BGTD: `[batch, kv_heads, tokens, head_dim]`.
        value_BGTD: As `key_BGTD`.
        attention_mask: Must be None: segments come from `cu_seq_lens_q`.
        scaling: Factor on the scores; None means `head_dim ** -0.5`.
        dropout: Attention dropout probability.
        is_causal: Overrides the layer's own flag.
        cu_seq_lens_q: int32 `[segments + 1]` boundaries in the sequences of the batch one after the other; None
            means that each is one segment.
        sliding_window: Must be None.

    Returns:
        `[batch, tokens, heads, head_dim]` and no weights.

    Raises:
        ValueError: a mask or a window is given, which this attention would have to ignore.
    """
    if attention_mask is not None:
        raise ValueError(f"`{PACKED}` attention takes no attention_mask: pack samples and pass cu_seq_lens_q")
    if sliding_window is not None:
        raise ValueError(f"`{PACKED}` attention has no sliding window: set use_sliding_window to false")
    batch, length = query_BHTD.shape[0], query_BHTD.shape[2]
    if cu_seq_lens_q is not None and batch > 1:
        rows = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query_BHTD, key_BGTD, value_BGTD))
        query, key, value = rows
        out = packed_attention(
            module, query, key, value, None, scaling=scaling, dropout=dropout, is_causal=is_causal,
            cu_seq_lens_q=cu_seq_lens_q,
        )[0]  # fmt: skip
        return out.unflatten(1, (batch, length))[0], None
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    half = query_BHTD.dtype in (torch.float16, torch.bfloat16)
    if cu_seq_lens_q is not None and query_BHTD.is_cuda and half:
        return _varlen_kernel()(query_BHTD, key_BGTD, value_BGTD, cu_seq_lens_q, scale, dropout, causal), None
    lengths = [query_BHTD.shape[2]] if cu_seq_lens_q is None else (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    segments = zip(*(x.split(lengths, dim=2) for x in (query_BHTD, key_BGTD, value_BGTD)), strict=True)
    pieces = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        for q, k, v in segments
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


@functools.cache
def _varlen_kernel() -> Callable[..., torch.Tensor]:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return _torch_varlen

    def flash(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, drop: float, causal: bool
    ) -> torch.Tensor:
        longest = int((cu[1:] - cu[:-1]).max())
        packed = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out: torch.Tensor = flash_attn_varlen_func(
            *packed, cu, cu, longest, longest, dropout_p=drop, softmax_scale=scale, causal=causal
        )
        return out[None]

    return flash


def _torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, drop: float, causal: bool
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if drop:
        raise ConfigError(
            f"torch's variable-length attention has no dropout (attention_dropout is {drop:g})",
            where="model.hf_config",
            hint="set it to 0, or install flash-attn",
        )
    longest = int((cu[1:] - cu[:-1]).max())
    groups = q.shape[1] // k.shape[1]
    query, key, value = (
        x[0].repeat_interleave(n, dim=0).transpose(0, 1).contiguous() for x, n in ((q, 1), (k, groups), (v, groups))
    )
    # Some releases fix the scale at 1/sqrt(head_dim): fold any other one into the query.
    query = query * (scale * q.shape[-1] ** 0.5)
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(query, key, value, cu, cu, longest, longest, window_size=window)
    assert isinstance(out, torch.Tensor)
    return out[None]
