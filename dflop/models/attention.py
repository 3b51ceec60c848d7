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
Window = tuple[int, int]
"""Keys before and behind a token that it attends to; -1: all."""


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
        sliding_window: Keys that a token attends to at most, itself among them; None: all before it.

    Returns:
        `[batch, tokens, heads, head_dim]` and no weights.

    Raises:
        ValueError: a mask is given, which this attention would have to ignore, or a window that looks both ways.
    """
    if attention_mask is not None:
        raise ValueError(f"`{PACKED}` attention takes no attention_mask: pack samples and pass cu_seq_lens_q")
    batch, length = query_BHTD.shape[0], query_BHTD.shape[2]
    if cu_seq_lens_q is not None and batch > 1:
        rows = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query_BHTD, key_BGTD, value_BGTD))
        query, key, value = rows
        out = packed_attention(
            module, query, key, value, None, scaling=scaling, dropout=dropout, is_causal=is_causal,
            cu_seq_lens_q=cu_seq_lens_q, sliding_window=sliding_window,
        )[0]  # fmt: skip
        return out.unflatten(1, (batch, length))[0], None
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise ValueError(f"`{PACKED}` attention has sliding windows for causal layers only")
    half = query_BHTD.dtype in (torch.float16, torch.bfloat16)
    if cu_seq_lens_q is not None and query_BHTD.is_cuda and half:
        window = (-1 if sliding_window is None else sliding_window - 1, 0) if causal else (-1, -1)
        return _varlen_kernel()(query_BHTD, key_BGTD, value_BGTD, cu_seq_lens_q, scale, dropout, window), None
    lengths = [query_BHTD.shape[2]] if cu_seq_lens_q is None else (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    segments = zip(*(x.split(lengths, dim=2) for x in (query_BHTD, key_BGTD, value_BGTD)), strict=True)
    pieces = []
    for q, k, v in segments:
        band = _band(q.shape[2], sliding_window, q.device)
        pieces.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=band, dropout_p=dropout, is_causal=causal and band is None, scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )  # fmt: skip
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Mask of a causal segment that is longer than its window; None where no mask is needed."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


@functools.cache
def _varlen_kernel() -> Callable[..., torch.Tensor]:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return _torch_varlen

    def flash(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, drop: float, window: Window
    ) -> torch.Tensor:
        longest = int((cu[1:] - cu[:-1]).max())
        packed = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out: torch.Tensor = flash_attn_varlen_func(
            *packed, cu, cu, longest, longest, dropout_p=drop, softmax_scale=scale, causal=window[1] == 0,
            window_size=window,
        )  # fmt: skip
        return out[None]

    return flash


def _torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, drop: float, window: Window
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
    out = varlen_attn(query, key, value, cu, cu, longest, longest, window_size=window)
    assert isinstance(out, torch.Tensor)
    return out[None]
