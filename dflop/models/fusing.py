"""Which norms and MLPs of a model are given the forwards of `fused.py`: those whose own forward computes the same.

Names say too little: norms called RMSNorm scale by `w`, or by `1 + w`. A module's own forward runs on random input in
float64, in a small copy with random weights, and so does every forward of ours that its parameters allow. One whose
output and gradients are equal takes its place; of several the one that rounds as the class does in bfloat16. The check
takes milliseconds per kind of module, and a class that it cannot run keeps its forward.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dflop.models import fused
from dflop.models.fused import Forward

_TOLERANCE = 1e-9
_NUM_ROWS = 6
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""What norms call the number that they add to the variance."""
_PLAIN = (int, float, str, bool, type(None))


def fuse(model: nn.Module) -> None:
    """Give norms and MLPs of a Hugging Face model forwards that keep less; call it before the model is cut."""
    fused.linear_patches(model)
    found: dict[Hashable, Forward | None] = {}
    for module in model.modules():
        if not _is_candidate(module):
            continue
        if (kind := _kind(module)) not in found:
            found[kind] = equal_forward(module)
        if (forward := found[kind]) is not None:
            module.forward = types.MethodType(forward, module)


def equal_forward(module: nn.Module) -> Forward | None:
    """The forward of `fused.py` that equals the module's own; None: none does."""
    equal: list[tuple[float, Forward]] = []
    with torch.enable_grad():
        for forward in _forwards(module):
            with contextlib.suppress(Exception):  # whatever a class raises for sizes that it does not expect
                if _error(module, forward, torch.float64) < _TOLERANCE:
                    equal.append((_error(module, forward, torch.bfloat16), forward))
    return min(equal, key=lambda of: of[0])[1] if equal else None


class Float64(TorchFunctionMode):
    """Whatever casts to float32 inside casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **named)


def _is_candidate(module: nn.Module) -> bool:
    """Whether it is a norm or an MLP by its parts, and takes hidden states alone."""
    first, *others = inspect.signature(module.forward).parameters.values()
    return not others and first.kind is first.POSITIONAL_OR_KEYWORD and any(True for _ in _forwards(module))


def _kind(module: nn.Module) -> Hashable:
    """What modules with one forward have in common."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
    shapes = ((name, p.shape) for name, p in module.named_parameters())
    parts = ((name, type(child)) for name, child in module.named_children())
    return type(module), frozenset(own.items()), tuple(shapes), tuple(parts)


def _forwards(module: nn.Module) -> Iterator[Forward]:
    """Forwards of ours that could be the module's."""
    own, parts = {name for name, p in module._parameters.items() if p is not None}, dict(module.named_children())
    if own == {"weight"} and not parts:
        epsilon = next((name for name in _EPSILONS if hasattr(module, name)), "")
        if epsilon and getattr(module.weight, "ndim", 0) == 1:
            yield from fused.norm_forwards(epsilon)
    linears = {name: part for name, part in parts.items() if isinstance(part, nn.Linear)}
    others = [name for name in parts if name not in linears]
    if own or len(linears) not in (2, 3) or any(True for name in others for _ in parts[name].parameters()):
        return
    activations = [name for name in others if not isinstance(parts[name], nn.Dropout | nn.Identity)]
    if len(activations) == 1:
        yield from _mlp_forwards(linears, activations[0])


def _mlp_forwards(linears: Mapping[str, nn.Linear], activation: str) -> Iterator[Forward]:
    """By the widths of the Linears, which leave it open what is the gate."""
    for names in itertools.permutations(linears):
        down, up, gate = (*names, "")[:3]
        width, made = linears[down].in_features, linears[up].out_features
        if made == width and (not gate or linears[gate].out_features == width):
            yield fused.mlp_forward(gate, up, down, activation)
        if made == 2 * width and not gate:
            yield from (fused.packed_mlp_forward(up, down, activation, half) for half in (0, 1))


def _error(module: nn.Module, forward: Forward, dtype: torch.dtype) -> float:
    """Largest relative difference of output and gradients between the class's forward and ours, on a small copy."""
    generator = torch.Generator().manual_seed(0)
    small, width = _small(module, generator)
    small.to(dtype)
    # Large rows show where a class clamps, small ones what is added to a variance.
    sizes = torch.logspace(2, -4, _NUM_ROWS).double()[:, None]
    hidden = (torch.randn(1, _NUM_ROWS, width, generator=generator, dtype=torch.float64) * sizes).to(dtype)
    given, grad = [hidden.requires_grad_(), *small.parameters()], None
    made: list[tuple[torch.Tensor, ...]] = []
    with Float64() if dtype == torch.float64 else contextlib.nullcontext():
        for run in (small.forward, types.MethodType(forward, small)):
            out = run(hidden)
            if grad is None:
                grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
            made.append((out, *torch.autograd.grad(out, given, grad)))
    pairs = ((a.detach().double(), b.detach().double()) for a, b in zip(*made, strict=True))
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def _small(module: Any, generator: torch.Generator) -> tuple[nn.Module, int]:
    """(a copy on the CPU with random weights, its Linears narrow; the width that it takes).

    Widths that are equal, or one twice the other, stay so.
    """
    narrow: dict[int, int] = {}
    for n in sorted({n for part in module.children() if isinstance(part, nn.Linear) for n in part.weight.shape}):
        half = narrow.get(n // 2) if n % 2 == 0 else None
        narrow[n] = 2 * half if half else 24 + 8 * len(narrow)
    small = _with_weights(module, {}, generator)
    small._modules = {
        name: _with_weights(part, narrow, generator) if isinstance(part, nn.Linear) else part
        for name, part in module._modules.items()
    }
    first = next((part for part in small.children() if isinstance(part, nn.Linear)), None)
    return small, len(small.weight) if first is None else first.in_features


def _with_weights(module: Any, narrow: Mapping[int, int], generator: torch.Generator) -> Any:
    made = copy.copy(module)
    made._parameters = {}
    for name, p in module._parameters.items():
        shape = [narrow.get(n, n) for n in p.shape] if p is not None else []
        made._parameters[name] = None if p is None else nn.Parameter(torch.randn(shape, generator=generator).double())
    if isinstance(made, nn.Linear):
        made.out_features, made.in_features = made.weight.shape
    return made
