"""Layers compiled one by one (`torch.compile`), so that operations between matmuls share kernels.

A layer's own forward is compiled: hooks of FSDP2, recomputation and copies to the host stay around it, as they are
around an eager one (the order of torchtitan: tensor parallelism, compiling, FSDP2). Attention over packed samples and
messages between ranks are `opaque`, and a layer is a few graphs between them. Sizes are symbols, so that no number of
tokens compiles anew, and layers of one class share what was compiled for the first.

transformers' own norms and MLPs take the places of those in `fused.py`, which compilers cannot look into. What the
compiler makes of a gated MLP keeps one more tensor of its width: `compiled` in `dflop/cost/activations.py`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.autograd import WHOLE
from dflop.models.generic.experts import experts_of
from dflop.models.generic.packed import runs_per_sample

INDUCTOR = "inductor"
"""torch's compiler. It needs a C++ compiler on a CPU, Triton on a GPU."""
EAGER = ""
MAX_PROGRAMS = 64
"""Most programs of one function: with and without gradients, of one token, of views, of every kind of layer."""


def check_compilable(layers: Sequence[nn.Module]) -> None:
    """Refuse layers that compilers would cut to pieces or compile for every batch anew.

    Raises:
        ConfigError: a layer dispatches tokens to experts, or carries a state along the tokens of each sample.
    """
    for layer in layers:
        has_experts = any(True for _ in experts_of(layer))
        if has_experts or any(runs_per_sample(module) for module in layer.modules()):
            what = "has experts" if has_experts else "carries a state along the tokens"
            raise ConfigError(
                f"{type(layer).__name__} {what}, and such layers are not compiled", where="train.compile",
                hint="set it to false",
            )  # fmt: skip


def compile_layers(layers: Sequence[Any], backend: str) -> None:
    """Compile layers in place; nothing is compiled before they run.

    Args:
        layers: As they are to run, but for FSDP2.
        backend: Of `torch.compile`.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(MAX_PROGRAMS, config.recompile_limit)
    for layer in layers:
        layer.forward = _compiled(layer, backend)
        for module in layer.modules():
            if hasattr(module, WHOLE):  # its caller is opaque
                setattr(module, WHOLE, torch.compile(getattr(module, WHOLE), dynamic=True, backend=backend))


def _compiled(layer: Any, backend: str) -> Any:
    """The compiled forward of a layer, which runs as its way says where that is asked in transformers' forward.

    Older releases ask in `__call__`, around it, and layers that cannot run again nowhere.
    """
    base = next((base for base in type(layer).__mro__ if base.__name__ == "GradientCheckpointingLayer"), None)
    if base is None or "__call__" in vars(base):
        return torch.compile(layer.forward, dynamic=True, backend=backend)
    plain = types.MethodType(layer.forward.__func__.__wrapped__, layer)
    return functools.partial(_run, layer, torch.compile(plain, dynamic=True, backend=backend))


def _run(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(functools.partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)
