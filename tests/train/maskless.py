"""SDPA that keeps for its backward pass what kernels on a GPU keep of segments with more keys than queries."""

from __future__ import annotations

from typing import Any

import torch

SDPA = torch.nn.functional.scaled_dot_product_attention


def maskless(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """SDPA that keeps no mask, as kernels do that align segments of queries and keys at their ends."""
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
