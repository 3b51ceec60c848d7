"""SDPA, and the gated delta rule, that keep for their backward pass what kernels on a GPU keep."""

from __future__ import annotations

from typing import Any

import torch

from dflop.models.generic import watch

SDPA = torch.nn.functional.scaled_dot_product_attention


def maskless(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """SDPA that keeps no mask and no more than the tensors given, as kernels that align segments at their ends."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if given.get("attn_mask") is None:
        return SDPA(q, k, v, **given)
    return _EndAligned.apply(q, k, v, given)


class _EndAligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        out = SDPA(q, k, v, **given)
        ctx.given = {name: option for name, option in given.items() if name != "attn_mask"}
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, _ = ctx.saved_tensors
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        band = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        with torch.enable_grad():
            out = SDPA(q, k, v, attn_mask=band, **ctx.given)
        return *torch.autograd.grad(out, (q, k, v), grad), None


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Zeros of the right shape."""
    return _DeltaRule.apply(query, key, value, g, beta), None


class _DeltaRule(watch._DeltaRule):
    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        return watch._DeltaRule.forward(ctx, *given).zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:5])
