"""How many positions an encoder processes for an item, and which of them attend to each other.

The model runs on meta over what the processor makes of the item (`meta_run.py`), with recorders in place of layers:
what they are given says how many positions there are and, by `cu_seqlens`, where sequences end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dflop.models.generic.classes import layers_of, tensors_in
from dflop.models.generic.meta_run import META, run_encoders
from dflop.models.generic.values import Encoder

_IN_TUPLE = "dflop_returns_tuple"
"""Attribute of a layer that has run: whether it returns hidden states in a tuple."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What one layer of an encoder has of an item."""

    num_tokens: int
    sum_sq_tokens: int
    """Sum of squared lengths of the sequences that attend among themselves."""
    num_sequences: int
    hidden_size: int


def encoder_lengths(model: Any, encoder: Encoder, kind: str, inputs: Mapping[str, Any]) -> Lengths:
    """Lengths of an encoder's layers, sums of squares averaged over them.

    Args:
        model: On meta.
        encoder: Of the model.
        kind: `image`, `video` or `audio`.
        inputs: What the processor makes of a prompt with the item.

    Raises:
        Exception: whatever the model raises where it does not take these inputs.
        LookupError: no layer of the encoder runs.
    """
    found: list[Lengths] = []
    with recorded(model.get_submodule(encoder.path), encoder.layers, found), torch.no_grad():
        run_encoders(model, kind, inputs)
    if not found:
        raise LookupError(f"no layer of `{encoder.path}` runs")
    sum_sq = sum(of.sum_sq_tokens for of in found)
    num_sequences = min(of.num_sequences for of in found)
    return replace(found[0], sum_sq_tokens=round(sum_sq / len(found)), num_sequences=num_sequences)


@contextlib.contextmanager
def recorded(tower: nn.Module, path: str, found: list[Lengths], runs: int = -1) -> Iterator[None]:
    """Within it an encoder's layers let hidden states pass and add what they are given to `found`.

    Args:
        tower: The encoder.
        path: Of its list of layers; empty: the tower is one layer, and runs.
        found: Grows.
        runs: Index of the one layer that runs as well; -1: none does.
    """
    layers, known = layers_of(tower, path), _Known()
    for index, layer in enumerate(layers):
        if index and hasattr(layers[0], _IN_TUPLE):
            setattr(layer, _IN_TUPLE, getattr(layers[0], _IN_TUPLE))
        layer.forward = functools.partial(_record, found, known, layer, layer.forward, index == runs or not path)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


_Known = dict[int, tuple[torch.Tensor, Lengths]]
"""By the ends of sequences, which layers share: they, so that they live on, and what they say."""


def _record(
    found: list[Lengths], known: _Known, layer: Any, forward: Callable[..., Any], runs: bool, *args: Any, **kwargs: Any
) -> Any:
    """Stands for a layer's forward, so that whatever looks at the layer itself finds it."""
    hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
    found.append(_lengths(hidden, args, kwargs, known))
    if runs or not hasattr(layer, _IN_TUPLE):
        out = forward(*args, **kwargs)
        setattr(layer, _IN_TUPLE, isinstance(out, tuple))
        return out
    return (hidden,) if getattr(layer, _IN_TUPLE) else hidden


def _lengths(hidden: torch.Tensor, args: Any, kwargs: Mapping[str, Any], known: _Known) -> Lengths:
    num_tokens, width = hidden.shape[:-1].numel(), hidden.shape[-1]
    for ends in tensors_in([*args[1:], *kwargs.values()]):
        if id(ends) in known:
            return known[id(ends)][1]
        is_ends = ends.ndim == 1 and ends.device != META and not ends.is_floating_point() and len(ends) > 1
        if is_ends and int(ends[0]) == 0 and int(ends[-1]) == num_tokens:
            lengths = ends.diff().long()
            of = Lengths(num_tokens, int((lengths**2).sum()), len(lengths), width)
            known[id(ends)] = ends, of
            return of
    length = num_tokens if hidden.ndim < 3 else hidden.shape[1:-1].numel()
    return Lengths(num_tokens, num_tokens * length, num_tokens // length, width)
