"""One way to call autograd functions of ours: torch gives `Function.apply` no types."""

from __future__ import annotations

from typing import Any

import torch


def applied(function: Any, *given: Any) -> torch.Tensor:
    """What a `torch.autograd.Function` that makes one tensor makes of its arguments."""
    made: torch.Tensor = function.apply(*given)
    return made
