"""Attention of a generic decoder over packed samples, and parts of layers that carry a state along a sample's tokens.

The samples of a forward pass are noted where every module of a stage finds them, for not every decoder of transformers
hands arguments on to its attention. Plain, windowed and chunked layers take the project's packed attention; a mask is
made only for samples with images whose tokens see each other, and where a layer caps scores or has sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.models.attention import Earlier, packed_attention
from dflop.models.autograd import opaque
from dflop.models.generic.reach import Reach, UnknownArgument
from dflop.models.generic.states import across_ranks, has_state

NAME = "dflop_packed_generic"
"""Name of the attention that stages use."""
_HOLDER, _REACH = "dflop_holder", "dflop_reach"
_UNSHARED = "ranks cannot share a sample (cp)"
_HEEDED = {"softcap", "s_aux", "is_causal"}
_WITHOUT_EFFECT = {
    "use_cache", "position_ids", "position_embeddings", "output_attentions", "cache_position", "cu_seq_lens_q",
    "output_hidden_states", "return_dict", "output_router_logits", "num_items_in_batch",
}  # fmt: skip
"""Arguments of attention that change nothing in a packed forward pass of training."""


@dataclass(slots=True, eq=False)
class Samples:
    """The packed samples of one forward pass."""

    lengths: list[int]
    device: torch.device
    blocks: torch.Tensor | None = None
    """int64 `[tokens]`: a number per run of placeholders whose tokens see each other, 0 elsewhere; None: none do."""
    has_block: bool = False
    """Whether any sample has such a run."""
    earlier: Earlier | None = None
    """How context-parallel ranks exchange keys and values."""
    received: torch.Tensor | None = None
    """What enters the first layer of the stage."""
    counted: torch.Tensor | None = None
    """1 for tokens of healthy samples, 0 for others, `[tokens]`; of tensor-parallel ranks for each its share."""
    _bounds: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _masks: dict[tuple[int, Reach], torch.Tensor] = field(default_factory=dict)

    def bounds(self, chunk: int) -> tuple[torch.Tensor, int]:
        """(int32 boundaries of samples, or of their chunks, on the device; the longest segment)."""
        if chunk not in self._bounds:
            lengths = self.lengths
            if chunk:
                lengths = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
            bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            self._bounds[chunk] = bounds.to(self.device, non_blocking=True), max(lengths)
        return self._bounds[chunk]

    def mask(self, index: int, reach: Reach) -> torch.Tensor:
        """What a sample's queries see: bool `[tokens, tokens]`, queries first."""
        if (index, reach) not in self._masks:
            first, length = sum(self.lengths[:index]), self.lengths[index]
            tokens, block = torch.arange(length, device=self.device), None
            if self.blocks is not None:
                number = self.blocks[first : first + length]
                block = (number[:, None] == number) & (number > 0)
            self._masks[index, reach] = reach.sees(tokens, tokens, block)
        return self._masks[index, reach]


@dataclass(slots=True, eq=False)
class Holder:
    """What every module of a stage's decoder knows of the forward pass at hand."""

    samples: Samples | None = None

    def captured(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that sees the samples of now whenever it runs: other microbatches pass before it runs again."""
        samples = self.samples

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.samples = self.samples, samples
            try:
                return forward(*args, **kwargs)
            finally:
                self.samples = before

        return run


def prepare(layers: dict[int, nn.Module], reaches: tuple[Reach | None, ...], config: Any, holder: Holder) -> None:
    """Let the layers of a stage see packed samples.

    Args:
        layers: By their index in the decoder.
        reaches: Of all layers of the decoder.
        config: Of the decoder.
        holder: Which the stage fills before every forward pass.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, opaque(_attention))  # and no masks: decoders then make none
    config._attn_implementation = NAME
    for index, layer in layers.items():
        for module in layer.modules():
            setattr(module, _HOLDER, holder)
            setattr(module, _REACH, reaches[index] or Reach())
            if has_state(module):
                module.forward = functools.partial(_per_sample, module.forward, across_ranks(module, holder), holder)


def runs_per_sample(module: nn.Module) -> bool:
    """Whether a part of a stage's layers carries a state, so that it is called once per sample."""
    return hasattr(module, _HOLDER) and has_state(module)


def samples_of(module: nn.Module) -> Samples | None:
    """What a module of a stage's layers knows of the forward pass at hand."""
    holder: Holder | None = getattr(module, _HOLDER, None)
    return holder.samples if holder is not None else None


def _per_sample(
    forward: Callable[..., Any], across: Callable[..., Any] | None, holder: Holder, *args: Any, **kwargs: Any
) -> Any:
    samples = holder.samples
    if samples is None:  # not packed
        return forward(*args, **kwargs)
    if samples.earlier is None:
        return per_sample(forward, samples.lengths, *args, **kwargs)
    if across is None:
        raise UnknownArgument(f"{_UNSHARED}: a layer carries a state along the tokens")
    return across(*args, **kwargs)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention within each packed sample; shapes are those of `AttentionInterface`.

    Raises:
        UnknownArgument: the layer hands over something that would be ignored.
    """
    given = {name for name, argument in kwargs.items() if argument is not None}
    if strange := given - _HEEDED - _WITHOUT_EFFECT:
        raise UnknownArgument(f"attention of {type(module).__name__} takes {', '.join(sorted(strange))}")
    holder: Holder = getattr(module, _HOLDER)
    samples, reach = holder.samples, getattr(module, _REACH)
    assert samples is not None, "a stage notes its samples"
    if attention_mask is not None:
        raise UnknownArgument(f"{type(module).__name__} is given a mask by its decoder")
    is_plain = not given & {"softcap", "s_aux"}
    if samples.earlier is not None and (why := _whole(is_plain, reach, samples)):
        raise UnknownArgument(f"{_UNSHARED}: {type(module).__name__} {why}")
    if is_plain and not (reach.images and samples.has_block):
        return _packed(module, query, key, value, samples, reach, scaling, dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outs = []
    for index, (q, k, v) in enumerate(
        zip(*(x.split(samples.lengths, dim=2) for x in (query, key, value)), strict=True)
    ):
        seen = samples.mask(index, reach)
        if is_plain:
            is_grouped = q.shape[1] != k.shape[1]
            outs.append(F.scaled_dot_product_attention(q, k, v, seen, dropout, scale=scale, enable_gqa=is_grouped))
        else:
            outs.append(masked_attention(q, k, v, seen, scale, kwargs.get("softcap"), kwargs.get("s_aux")))
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _whole(is_plain: bool, reach: Reach, samples: Samples) -> str:
    """What attention does that needs all tokens of a sample on one rank; empty: nothing."""
    if not is_plain:
        return "caps scores or has sinks"
    if reach.chunk:
        return f"sees keys of the same chunk of {reach.chunk} tokens"
    return "lets tokens of an image see each other" if samples.has_block else ""


def _packed(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: Samples, reach: Reach,
    scaling: float | None, dropout: float,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    bounds, longest = samples.bounds(reach.chunk)
    of_keys: dict[str, Any] = {}
    if (earlier := samples.earlier) is not None:
        keys = torch.cat([bounds[:1], bounds[1:] + earlier.num_taken])
        longest_keys = max(samples.lengths[0] + earlier.num_taken, *samples.lengths)
        of_keys = {"cu_seq_lens_k": keys, "max_length_k": longest_keys, "earlier": earlier}
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    value = F.pad(value, (0, missing)) if missing > 0 else value  # latent attention: kernels want one width
    out, _ = packed_attention(
        module, query, key, value, None, scaling=scaling, dropout=dropout, is_causal=True,
        cu_seq_lens_q=bounds, max_length_q=longest, sliding_window=reach.window or None, **of_keys,
    )  # fmt: skip
    return out[..., :width], None


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
