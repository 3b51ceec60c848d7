"""The three products of a Linear, so that a decoder layer's Linears can compute them in another type (`float8.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MATMULS = "dflop_matmuls"
"""Attribute of a Linear whose products are not those of `Matmuls`."""


class Matmuls:
    """Products in the type of the tensors; rows are `[..., in]`, gradients `[..., out]`, a weight is `[out, in]`."""

    def out(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`rows @ weight.T + bias`."""
        return F.linear(rows, weight, bias)

    def of_rows(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Gradient of the rows."""
        return grad @ weight

    def of_weight(self, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Gradient of the weight."""
        return grad.flatten(0, -2).T @ rows.flatten(0, -2)


PLAIN = Matmuls()
