"""Which keys a token of a sample attends to, read from the masks that a model's own code makes.

transformers states a mask as a function of two indices. Where attention gets no mask but that function, a stage can
compute plain, windowed and chunked attention of packed samples without a mask, and images whose tokens see each other
from their placeholders. Each layer's function is asked once, when a stage is built, at the places where these differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dflop.models.generic.classes import Recorder, entry_of, extra_inputs, in_place

_NAME = "dflop_asked"
"""Name of the masks that are asked for."""
_BEFORE = 5
"""Tokens in front of the image in the sample that a model's masks are asked about."""


class UnknownArgument(NotImplementedError):
    """A model hands its decoder or its attention something that a generic stage would have to ignore."""


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


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a query sees in one layer; at most one of both limits is set."""

    window: int = 0
    """Keys at most, itself among them; 0: all before it."""
    chunk: int = 0
    """Tokens see keys of their own chunk of this length; 0: no chunks."""
    images: str = ""
    """Tokens of an image see each other: `near`, within the limits, or `all`; empty: they are like text."""
    is_joined: bool = False
    """Whether all images of a sample are as one."""

    def sees(self, queries: torch.Tensor, keys: torch.Tensor, block: torch.Tensor | None = None) -> torch.Tensor:
        """Which keys are seen, bool `[queries, keys]`, of indices in a sample.

        Args:
            queries: Indices.
            keys: Indices.
            block: bool `[queries, keys]`, whether both are of one image; None: the sample has none.
        """
        q, k = queries[:, None], keys[None]
        seen = k <= q
        if block is not None and self.images == "near":
            seen = seen | block
        if self.window:
            seen = seen & (q - k < self.window)
        if self.chunk:
            seen = seen & (q // self.chunk == k // self.chunk)
        return seen | block if block is not None and self.images == "all" else seen


def read_reaches(above: Any, name: str, mark: str) -> tuple[Reach | None, ...]:
    """Per layer of a decoder, which keys its tokens see; None where the layer is given no mask.

    Args:
        above: The model that calls the decoder; with or without memory.
        name: Of the decoder in it.
        mark: Argument of its forward that marks placeholders; empty: it has none.

    Raises:
        UnknownArgument: a layer sees keys by another rule.
    """
    decoder = getattr(above, name)
    limits = {n for key in ("sliding_window", "attention_chunk_size") if (n := entry_of(decoder.config, key))}
    most = max(limits, default=1)
    keys = torch.arange(2 * most + 4 * _BEFORE)
    queries = torch.tensor(sorted({q for n in (1, *limits) for q in (0, n - 1, n, n + 1, 2 * n, n + _BEFORE + 2)}))
    is_image = ((keys >= _BEFORE) & (keys < most + 2 * _BEFORE)).long()
    block = (is_image[queries, None] & is_image[None]).bool()
    found: list[Reach | None] = []
    of_images = _masks_with_image(above, name, mark, is_image) if mark else {}
    of_two = _masks_with_image(above, name, mark, is_image | (keys == keys[-1])) if of_images else {}
    for index, mask in enumerate(_masks_of_layers(decoder, len(keys))):
        if mask is None:
            found.append(None)
            continue
        rules = [Reach(), *(Reach(window=n) for n in limits), *(Reach(chunk=n) for n in limits)]
        rules = [r for r in rules if torch.equal(mask.at(queries, keys), r.sees(queries, keys))]
        if (with_image := of_images.get(index)) is not None:
            seen = with_image.at(queries, keys)
            rules = [replace(r, images=how) for r in rules for how in ("", "near", "all")]
            rules = [r for r in rules if torch.equal(seen, r.sees(queries, keys, block))]
            is_joined = bool(of_two[index].at(keys[_BEFORE, None], keys[-1:]))
            rules = [replace(r, is_joined=is_joined) for r in rules]
        if not rules:
            raise UnknownArgument(f"layer {index} of {type(decoder).__name__} attends by a rule that is not known")
        found.append(rules[0])
    return tuple(found)


def _masks_with_image(above: Any, name: str, mark: str, is_image: torch.Tensor) -> Mapping[int, Pattern]:
    """By layer, the masks that the model above a decoder makes for a sample with an image; empty: it makes none."""
    decoder = getattr(above, name)
    recorder = Recorder(decoder)
    given = {mark: is_image[None], **_beside(decoder, len(is_image))}
    with _patterns(decoder), in_place(above, name, recorder), torch.no_grad():
        above(inputs_embeds=_nothing(decoder, len(is_image)), use_cache=False, **given)
    masks, types = recorder.given.get("attention_mask"), entry_of(decoder.config, "layer_types")
    if masks is None:
        return {}
    of_layers = ((i, masks[types[i]] if isinstance(masks, Mapping) else masks) for i in range(len(decoder.layers)))
    return {index: mask for index, mask in of_layers if isinstance(mask, Pattern)}


def _masks_of_layers(decoder: Any, length: int) -> Iterator[Pattern | None]:
    """What each layer is given as a mask for a sample of `length`."""
    parts = dict(decoder._modules)
    recorders = [Recorder(layer) for layer in decoder.layers]
    hidden, given = _nothing(decoder, length), _beside(decoder, length)
    try:
        for name, part in parts.items():
            if part is not None and any(True for _ in part.parameters()):
                decoder._modules[name] = Recorder(part)
        decoder._modules["layers"] = nn.ModuleList(recorders)
        decoder.project_per_layer_inputs = lambda _, given: given  # whose modules stand aside
        with _patterns(decoder), torch.no_grad():
            decoder(inputs_embeds=hidden, use_cache=False, **given)
    finally:
        del decoder.project_per_layer_inputs
        decoder._modules.clear()
        decoder._modules.update(parts)
    for recorder in recorders:
        yield next((x for x in getattr(recorder, "given", {}).values() if isinstance(x, Pattern)), None)


def _nothing(decoder: Any, length: int) -> torch.Tensor:
    """Embeddings that take no memory."""
    return torch.zeros(1, 1, 1).expand(1, length, decoder.config.hidden_size)


def _beside(decoder: Any, length: int) -> dict[str, torch.Tensor]:
    return extra_inputs(decoder, length, torch.device("cpu"), torch.float32)


@contextlib.contextmanager
def _patterns(decoder: Any) -> Iterator[None]:
    """Within it, a decoder's masks are `Pattern`s."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(_NAME, lambda mask_function, **_: Pattern(mask_function))
    before, decoder.config._attn_implementation = decoder.config._attn_implementation, _NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = before
