"""One way to call autograd functions of ours: torch gives `Function.apply` no types; and what compilers leave alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

WHOLE = "dflop_whole_forward"
"""Attribute of a module that is called with a share of the tokens: its forward with all of them."""


_NO_BACKWARD = -1


def in_backward() -> bool:
    """Whether a backward pass is running: a layer that runs forward in it runs again."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


def applied(function: Any, *given: Any) -> torch.Tensor:
    """What a `torch.autograd.Function` that makes one tensor makes of its arguments."""
    made: torch.Tensor = function.apply(*given)
    return made


@functools.cache
def opaque(function: Any) -> Any:
    """The function, run as it is within compiled layers, too; always the same object, which these check."""
    return torch.compiler.disable(function)
