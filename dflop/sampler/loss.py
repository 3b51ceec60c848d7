"""The factor that makes uneven microbatches give the gradient of the whole global batch.

A trainer takes the mean loss of a microbatch, divides by the number of microbatches and averages over ranks. With equal
counts of tokens that is the mean over all tokens. With uneven ones it is not: a token in a small microbatch would count
more. The exact factor needs nothing but three counts.
"""

from __future__ import annotations

from typing import Literal

Reduction = Literal["mean", "sum"]


def loss_scale(
    num_tokens: float,
    num_global_tokens: float,
    num_replicas: int = 1,
    *,
    reduction: Reduction = "mean",
    averaged: bool = True,
) -> float:
    """What to multiply a microbatch's loss with, so that the step's gradient is the mean over all supervised tokens.

    Do not divide by the number of microbatches on top of it.

    Args:
        num_tokens: Tokens that carry loss in the microbatch.
        num_global_tokens: In the global batch, over all ranks.
        num_replicas: Data-parallel ranks.
        reduction: Whether the loss is the mean or the sum over the microbatch's tokens.
        averaged: Whether gradients are averaged over ranks, as DDP and FSDP do unless told otherwise; False: summed.
    """
    if not num_tokens:  # a mean over nothing may be NaN; so would be its product with 0, which the caller must skip
        return 0.0
    share = num_tokens / num_global_tokens if reduction == "mean" else 1 / num_global_tokens
    return share * (num_replicas if averaged else 1)
