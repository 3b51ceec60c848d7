"""What the layers of an encoder are made of, as they run on meta over what the processor makes of two items.

One layer of each kind runs, the others let hidden states pass. Bytes per token are the slope between the two items
where these differ in tokens; a tower of one fixed size has the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dflop.models.generic import watch
from dflop.models.generic.arrays import GRID
from dflop.models.generic.items import form_of
from dflop.models.generic.lengths import Lengths, recorded
from dflop.models.generic.meta_run import run_encoders
from dflop.models.generic.structure import DEGREES, Runs, alike, kind_of
from dflop.models.generic.values import AttentionCall, Encoder
from dflop.models.splits import degrees_of

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "nhead")
"""Attributes of modules that count an attention's heads."""


def traced_encoder(model: Any, encoder: Encoder, kind: str, items: Sequence[Mapping[str, Any]]) -> Encoder:
    """An encoder with the kinds of its layers and what comes before them.

    Args:
        model: On meta.
        encoder: Of the model, with layers.
        kind: `image`, `video` or `audio`.
        items: Two: what the processor makes of a prompt with an item.

    Raises:
        Exception: whatever the model raises where it does not take these inputs.
    """
    tower = model.get_submodule(encoder.path)
    if kind != "audio" and form_of(model.get_submodule(encoder.path.rpartition(".")[0])) == GRID:
        tower.config._attn_implementation = watch.PACKED  # as `items.prepare`
    layers = cast(nn.ModuleList, tower.get_submodule(encoder.layers))
    kinds = []
    for _, indices in alike(layers).items():
        first = indices[0]
        runs = [_run(model, encoder, first, kind, item) for item in items]
        (few, short), (many, long) = sorted(runs, key=lambda run: run[0].num_tokens)
        both = Runs((few.num_tokens, many.num_tokens), (short, long), short.flops)
        hidden_size = few.hidden_size
        of = kind_of(layers[first], indices, both, getattr(tower, "config", None), hidden_size)
        calls = _distinct(of.attention) or _stated(layers[first], hidden_size)
        kinds.append(replace(of, attention=calls, degrees=degrees_of(layers[first], DEGREES)))
    return replace(
        encoder,
        kinds=tuple(kinds),
        hidden_size=hidden_size,
        num_input_values=_input_values(model, encoder, kind, items[0]),
    )


def _run(model: Any, encoder: Encoder, index: int, kind: str, item: Mapping[str, Any]) -> tuple[Lengths, watch.Trace]:
    tower, found = model.get_submodule(encoder.path), list[Lengths]()
    layer = cast(nn.ModuleList, tower.get_submodule(encoder.layers))[index]
    with recorded(tower, encoder.layers, found, runs=index), watch.traced(layer) as trace:
        run_encoders(model, kind, item)
    return found[0], trace


def _distinct(calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    """A layer calls its attention once per sequence or window; all of these are one."""
    return tuple(dict.fromkeys(calls))


def _stated(layer: nn.Module, hidden_size: int) -> tuple[AttentionCall, ...]:
    """The attention of a layer that computes it by itself, by the heads that it states."""
    for module in layer.modules():
        heads = next((n for name in _HEADS if isinstance(n := getattr(module, name, None), int) and n), 0)
        if heads:
            width = hidden_size // heads
            return (AttentionCall(heads, heads, width, width, is_causal=False),)
    return ()


def _input_values(model: Any, encoder: Encoder, kind: str, item: Mapping[str, Any]) -> float:
    """Numbers of 16 bit that everything before the layers keeps of a token."""
    tower, found, kept = model.get_submodule(encoder.path), list[Lengths](), dict[int, torch.Tensor]()
    own = {p.untyped_storage()._cdata for p in (*tower.parameters(), *tower.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not found and (key := tensor.untyped_storage()._cdata) not in own:
            kept[key] = tensor
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with recorded(tower, encoder.layers, found), hooks:
        run_encoders(model, kind, item)
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / 2 / found[0].num_tokens
