"""The head and its cross entropy as one operation, a chunk of tokens at a time.

Logits are the largest tensor of a training step: with 152,000 ids a token's weigh as much as 42 hidden states of 3,584.
So no more than `CHUNK_TOKENS` tokens have theirs at once, in the model's type. Softmax, less one at the target, is
written over them, in float32 but by blocks of `BLOCK_BYTES`, and turned at once into gradients of hidden states and of
the head, whose sum over chunks is float32. A backward pass only scales them, so no product is computed twice (as in
Liger's fused loss, arXiv 2410.10989, but without a kernel of ours). What nobody wants is not made.

Where ranks share the vocabulary (arXiv 1909.08053, section 3) the same code runs on a rank's rows of the head: ranks
agree on the greatest logit of each token of a chunk, then on the sum of its exponentials and its target's logit. How
ranks exchange numbers is an argument, so that the arithmetic can be checked without processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from dflop.models import loss_size
from dflop.models.autograd import applied


class Reduce(Protocol):
    """Combine float32 `values` of one shape over all ranks, by their sum or their maximum; collective."""

    def __call__(self, values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor: ...


class HeadLoss(Protocol):
    """Sum of cross entropies over `num_tokens`; arguments as of `head_loss`, weight and bias as the head has them."""

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        num_tokens: int, of_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


def _alone(values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
    return values


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, num_tokens: int,
    of_tokens: torch.Tensor | None = None, *, first: int = 0, reduce: Reduce = _alone,
) -> torch.Tensor:  # fmt: skip
    """Sum of cross entropies over `num_tokens`, the same number on every rank; the backward pass exchanges nothing.

    Args:
        hidden: `[tokens, hidden]`; its gradient is a summand of the whole where ranks share the vocabulary.
        weight: `[rows, hidden]`, this rank's rows of the head, at least one; its gradient is made in float32.
        bias: `[rows]`, or None.
        targets: int64 `[tokens]`, ids of the whole vocabulary, the same on every rank.
        num_tokens: What the sum is divided by, before gradients are rounded to the type of hidden states.
        of_tokens: float32 `[tokens]`, takes the cross entropy of each; None: only their sum is wanted.
        first: Id of the first row.
        reduce: How ranks exchange numbers: called twice per chunk, for `[tokens]` and for `[2, tokens]`.

    Returns:
        float32 scalar.
    """
    return applied(
        _HeadLoss, hidden, weight, bias, targets, num_tokens, of_tokens, first, reduce, torch.is_grad_enabled()
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        num_tokens: int, of_tokens: torch.Tensor | None, first: int, reduce: Reduce, is_training: bool,
    ) -> torch.Tensor:  # fmt: skip
        needed = [is_training and needs for needs in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        # Without a token nothing is written into them.
        new = torch.empty_like if len(hidden) else torch.zeros_like
        of_weight = new(weight, dtype=torch.float32) if needed[1] else None
        of_bias = new(bias, dtype=torch.float32) if bias is not None and needed[2] else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), loss_size.CHUNK_TOKENS):
            chunk = slice(start, start + loss_size.CHUNK_TOKENS)
            logits = F.linear(hidden[chunk], weight, bias)
            of_chunk = _cross_entropies(logits, targets[chunk] - first, num_tokens, reduce, needs_error=any(needed))
            loss += of_chunk.sum()
            if of_tokens is not None:
                of_tokens[chunk] = of_chunk
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[chunk])
            _accumulate(of_weight, of_bias, logits, hidden[chunk], is_first=not start)
            del logits  # before there are others
        ctx.save_for_backward(of_hidden)
        ctx.of_head = of_weight, of_bias  # not saved: no activations, and handed over without a copy
        return loss / num_tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_hidden,), of_head = ctx.saved_tensors, ctx.of_head
        del ctx.of_head
        return *(None if made is None else made.mul_(grad) for made in (of_hidden, *of_head)), *6 * (None,)


def _cross_entropies(
    logits: torch.Tensor, targets: torch.Tensor, num_tokens: int, reduce: Reduce, *, needs_error: bool
) -> torch.Tensor:
    """Cross-entropies of one chunk, `[tokens]`; the logits' gradient takes their place if it is needed.

    Args:
        logits: `[tokens, rows]`.
        targets: The row of each token's target, or where it would be if this rank had it.
        num_tokens: What the gradient is divided by.
        reduce: As for `head_loss`.
        needs_error: Whether to make the gradient.
    """
    is_mine = (targets >= 0) & (targets < logits.shape[1])
    # No `scatter_`: on a CPU it copies all logits in float32.
    at_target = torch.arange(len(targets), device=targets.device), targets.where(is_mine, 0)
    highest = reduce(logits.amax(dim=1).float(), maximum=True)
    of_target = (logits[at_target] - highest).where(is_mine, 0.0)
    blocks = list(_row_blocks(logits, loss_size.BLOCK_BYTES // 4))
    total = torch.cat([torch.sub(logits[rows], highest[rows, None]).exp_().sum(dim=1) for rows in blocks])
    total, of_target = reduce(torch.stack([total, of_target])).unbind()
    log_total = total.log()
    if needs_error:
        shift = highest + log_total + math.log(num_tokens)
        for rows in blocks:
            logits[rows] = torch.sub(logits[rows], shift[rows, None]).exp_()
        error = torch.expm1(of_target - log_total) / num_tokens
        logits[at_target] = error.to(logits.dtype).where(is_mine, logits[at_target])
    return log_total - of_target


def _accumulate(
    weight: torch.Tensor | None, bias: torch.Tensor | None, error: torch.Tensor, hidden: torch.Tensor, *, is_first: bool
) -> None:
    """Add a chunk's gradient of the head, given that of its logits; the first one's replaces what was there."""
    if weight is not None and weight.dtype == error.dtype:
        weight.addmm_(error.T, hidden, beta=0.0 if is_first else 1.0)
    elif weight is not None:
        for rows in _row_blocks(weight, loss_size.PART_BYTES // error.element_size()):
            part = weight[rows]
            (part.copy_ if is_first else part.add_)(error[:, rows].T @ hidden)
    if bias is not None:
        (bias.copy_ if is_first else bias.add_)(error.sum(dim=0, dtype=torch.float32))


def _row_blocks(matrix: torch.Tensor, num_values: int) -> Iterator[slice]:
    """Rows of up to so many values in all, at least one."""
    step = max(1, num_values // matrix.shape[1])
    return (slice(first, first + step) for first in range(0, len(matrix), step))
