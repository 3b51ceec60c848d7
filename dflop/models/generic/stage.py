"""A pipeline stage of any decoder of transformers: the model's text model, layers of other stages let through.

Indices and `layer_types` stay as they are. What enters the first layer of a stage is replaced by what was received, and
what would enter the layer behind the last is handed on, because some decoders scale embeddings before the first layer,
add deep features between layers, or read the embeddings again in later ones.

Samples are packed one behind the other. Attention keeps them apart by the pattern that transformers states as a
function of two indices, so that windows, chunks and images whose tokens see each other come out as the model has them.
A part that carries a state along the tokens (it holds a convolution) is called once per sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.models.attention import packed_attention
from dflop.models.generic.classes import SHARED, PassThrough, entry_of, find_decoder

NAME = "dflop_generic"
"""Of the attention and the masks that stages use."""
_PACKING = "dflop_packing"
_HEEDED = {"softcap", "s_aux", "is_causal"}
_WITHOUT_EFFECT = {"use_cache", "position_ids", "position_embeddings", "output_attentions", "cache_position",
                   "cu_seq_lens_q", "output_hidden_states", "return_dict", "output_router_logits"}  # fmt: skip
"""Arguments of attention that change nothing in a packed forward pass of training."""


class UnknownArgument(NotImplementedError):
    """A model hands its decoder or its attention something that a generic stage would have to ignore."""


@dataclass(slots=True)
class Packing:
    """The samples of the forward pass at hand; every module of a stage's decoder has it."""

    lengths: list[int] = field(default_factory=list)
    patterns: list[Any] = field(default_factory=list)
    """Of each sample: a `Pattern`, one per kind of layer, or None where the decoder states its own."""


class Pattern:
    """Which keys a query sees: a function of indices, for which no mask is made.

    Stands where transformers' code has a mask, and answers what that code asks of one.
    """

    shape = ()

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[len(tokens), len(tokens)]`, queries first."""
        return self.at(tokens, tokens)

    def at(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which keys are seen: bool `[queries, keys]`."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        seen = self._function(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
        return seen.expand(1, 1, len(queries), len(keys))[0, 0]

    def __getitem__(self, index: tuple[slice, ...]) -> Pattern:
        """The pattern itself: models that slice a mask for generation keep all of it in training.

        Raises:
            UnknownArgument: a part of it is wanted.
        """
        if all(part in (slice(None), slice(0, None)) for part in index):
            return self
        raise UnknownArgument("its decoder cuts a part of the attention mask")


def register() -> None:
    """Make attention and masks known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda mask_function, **_: Pattern(mask_function))


class Stage:
    """Layers [first, end) of a model's decoder.

    Args:
        model: Taken over, one per stage; its layers outside the stage go.
        first: First layer.
        end: One behind the last.
    """

    def __init__(self, model: nn.Module, first: int, end: int) -> None:
        self.model, self._packing = model, Packing()
        self._received: torch.Tensor | None = None
        self._left: torch.Tensor | None = None
        _, self.decoder = find_decoder(model)
        self.first, self.end, self.num_layers = first, end, len(self.decoder.layers)
        if first > (latest := last_cut(self.decoder)):
            raise UnknownArgument(
                f"`{SHARED}`: behind layer {latest}, layers use keys of layers that another stage has"
            )
        self.decoder.config._attn_implementation = NAME
        for index, layer in enumerate(self.decoder.layers):
            if not first <= index < end:
                self.decoder.layers[index] = PassThrough(layer)
        for module in self.decoder.modules():
            setattr(module, _PACKING, self._packing)
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                module.forward = functools.partial(self._per_sample, module.forward)
        if first:
            self.decoder.layers[first].register_forward_pre_hook(self._replace, with_kwargs=True)
        if end < self.num_layers:
            self.decoder.layers[end].register_forward_pre_hook(self._take, with_kwargs=True)

    def forward(self, hidden: torch.Tensor, packing: Packing, inputs: Mapping[str, Any]) -> torch.Tensor:
        """`[1, tokens, hidden]` that enters the stage's first layer to what leaves its last.

        Args:
            hidden: Of all samples; the first stage takes its embeddings from `inputs`.
            packing: The samples.
            inputs: Of the decoder: embeddings, positions, and what else the model hands it.
        """
        self._packing.lengths, self._packing.patterns = packing.lengths, packing.patterns
        self._received = hidden
        out = self.decoder(use_cache=False, **self._own(inputs))
        left: torch.Tensor | None = out.last_hidden_state if self.end == self.num_layers else self._left
        assert left is not None
        return left

    def _own(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Deep features are added behind layers by the decoder: those of other stages' layers are zeros here."""
        deep = inputs.get("deepstack_visual_embeds")
        if deep is None:
            return dict(inputs)
        own = [x if self.first <= index < self.end else torch.zeros_like(x) for index, x in enumerate(deep)]
        return {**inputs, "deepstack_visual_embeds": own}

    def _per_sample(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return per_sample(forward, self._packing.lengths, *args, **kwargs)

    def _replace(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def _take(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._left = args[0] if args else kwargs["hidden_states"]


def last_cut(decoder: Any) -> int:
    """The last layer that may be the first of a stage: layers that use keys of others stay in their stage."""
    num_layers, shared = len(decoder.layers), entry_of(decoder.config, SHARED) or 0
    types = entry_of(decoder.config, "layer_types") or [""] * num_layers
    wanted = set(types[num_layers - shared :]) if shared else ()
    givers = (max(i for i in range(num_layers - shared) if types[i] == kind) for kind in wanted)
    return min(givers, default=num_layers)


def per_sample(forward: Callable[..., Any], lengths: list[int], *args: Any, **kwargs: Any) -> Any:
    """Call a part of a layer once per sample, with every argument that has an entry per token cut."""
    outs = []
    for index in range(len(lengths)):
        cut = functools.partial(_cut, lengths=lengths, index=index)
        outs.append(forward(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}))
    if isinstance(outs[0], tuple):
        return (torch.cat([out[0] for out in outs], dim=1), *outs[0][1:])
    return torch.cat(outs, dim=1)


def _cut(value: Any, lengths: list[int], index: int) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_cut(each, lengths, index) for each in value)
    if isinstance(value, torch.Tensor):
        for axis in sorted(range(value.ndim), key=lambda axis: axis != 1):  # tokens are the second, if any
            if value.shape[axis] == sum(lengths):
                return value.split(lengths, axis)[index]
    return value


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention within each packed sample; shapes are those of `AttentionInterface`.

    Plain causal samples, windowed or not, take the project's packed attention, others a mask per sample.

    Raises:
        UnknownArgument: the layer hands over something that would be ignored.
    """
    given = {name for name, argument in kwargs.items() if argument is not None}
    if strange := given - _HEEDED - _WITHOUT_EFFECT:
        raise UnknownArgument(f"attention of {type(module).__name__} takes {', '.join(sorted(strange))}")
    packing: Packing = getattr(module, _PACKING)
    stated = [_seen(module, attention_mask, packing, index) for index in range(len(packing.lengths))]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bands = [_band(n, sliding_window) for n in packing.lengths]
    patterns = [band if seen is None else seen for seen, band in zip(stated, bands, strict=True)]
    is_plain = all(torch.equal(seen, band) for seen, band in zip(patterns, bands, strict=True))
    if is_plain and not given & {"softcap", "s_aux"}:
        bounds = torch.tensor([0, *packing.lengths]).cumsum(0)
        return packed_attention(
            module, query, key, value, None, scaling=scale, dropout=dropout, is_causal=True,
            cu_seq_lens_q=bounds, sliding_window=sliding_window,
        )  # fmt: skip
    cut = zip(*(x.split(packing.lengths, dim=2) for x in (query, key, value)), patterns, strict=True)
    outs = [masked_attention(q, k, v, seen, scale, kwargs.get("softcap"), kwargs.get("s_aux")) for q, k, v, seen in cut]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _seen(module: Any, mask: Any, packing: Packing, index: int) -> torch.Tensor | None:
    """Which keys the queries of a sample see; None where only the layer's window says."""
    first, length = sum(packing.lengths[:index]), packing.lengths[index]
    pattern = packing.patterns[index]
    if isinstance(pattern, Mapping):
        pattern = pattern[getattr(module, "layer_type", None) or module.config.layer_types[module.layer_idx]]
    if isinstance(pattern, Pattern):  # of this sample alone, by the model above the decoder
        return pattern(torch.arange(length))
    return mask(torch.arange(first, first + length)) if isinstance(mask, Pattern) else None


def _band(length: int, window: int | None) -> torch.Tensor:
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen.triu(1 - window) if window else seen


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """One sample's attention with a mask, capped scores and a sink per head that takes a share and gives nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = F.pad(scores, (0, 1)) + F.pad(sink, (scores.shape[-1], 0))
    return scores.softmax(-1, torch.float32)[..., : k.shape[2]].to(q.dtype) @ v
