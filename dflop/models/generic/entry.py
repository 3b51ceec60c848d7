"""Both ends of a decoder cut into stages, by the classes' own forwards: what its first layer is given, and its head.

The model above the decoder runs sample by sample with a recorder in the decoder's place, so that media rows land in
their places and rope positions, deep features and masks are the model's. Rows of the encoders are made before, by the
model's own `get_image_features` for all samples at once, and handed in as `mm_encoder_outputs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dflop.models.generic.classes import Output, Recorder, find_decoder, in_place, tensors_in
from dflop.models.generic.stage import Packing, Pattern, UnknownArgument

_FIRST = {"input_ids", "inputs_embeds", "position_ids", "attention_mask"}
_HANDED_ON = ("visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs")
_OUTPUTS = "mm_encoder_outputs"
MARKS = ("mm_token_type_ids", "token_type_ids")
"""Arguments of a forward pass that say which tokens are placeholders."""
_PER_SAMPLE = ("pooler_output", "deepstack_features")


def enter(
    model: Any, samples: Sequence[torch.Tensor], media: Sequence[Mapping[str, Any]]
) -> tuple[Packing, dict[str, Any]]:
    """(packing, inputs of the decoder) for samples one behind the other.

    Args:
        model: With its decoder in place; encoders run here.
        samples: Token ids of each, `[tokens]`.
        media: What each sample's forward takes beside its ids.

    Raises:
        UnknownArgument: the model hands its decoder something that stages do not know.
    """
    path, decoder = find_decoder(model)
    above, _, name = path.rpartition(".")
    given = []
    for ids, arguments in zip(samples, _encoded(model, media), strict=True):
        recorder = Recorder(decoder)
        with in_place(model.get_submodule(above), name, recorder):
            model(input_ids=ids[None], use_cache=False, **arguments)
        given.append(recorder.given)
    names = {name for call in given for name, value in call.items() if any(True for _ in tensors_in(value))}
    if strange := names - _FIRST - set(_HANDED_ON):
        raise UnknownArgument(f"{type(decoder).__name__} takes {', '.join(sorted(strange))}")
    patterns = [call.get("attention_mask") for call in given]
    packing = Packing([len(ids) for ids in samples], [p if isinstance(p, Pattern | dict) else None for p in patterns])
    counted = [torch.arange(len(ids))[None] for ids in samples]
    stated = [call.get("position_ids") for call in given]
    positions = [own if p is None else p for p, own in zip(stated, counted, strict=True)]
    inputs = {
        "inputs_embeds": torch.cat([call["inputs_embeds"] for call in given], dim=1),
        "position_ids": torch.cat(positions, dim=-1),
    }
    joined = {name: _joined([call[name] for call in given]) for name in _HANDED_ON if given[0].get(name) is not None}
    return packing, inputs | joined


def handed_on(inputs: Mapping[str, Any], hand: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Inputs of the decoder on the next stage, every float tensor passed through `hand`."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(each) for each in value]
        return hand(value) if value.is_floating_point() else value

    return {name: move(value) for name, value in inputs.items()}


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`[1, tokens, vocab]` by the class's own forward, with its scale and its cap on logits.

    Args:
        model: Whose head is asked.
        hidden: What left the decoder, `[1, tokens, hidden]`.
    """
    prefix = model.base_model_prefix
    if not isinstance(getattr(model, prefix, None), nn.Module):  # a causal model inside, which has the head
        model, prefix = model.language_model, "model"
    with in_place(model, prefix, _Given(hidden)):
        logits: torch.Tensor = model(input_ids=torch.zeros(hidden.shape[:2], dtype=torch.long)).logits
    return logits


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward, or the forward inside it, names an argument."""
    return any(name in inspect.signature(m.forward).parameters for m in (model, model.base_model))


def feature_function(model: Any, name: str) -> Callable[..., Any] | None:
    """`get_image_features` or a sibling of a model; None where it has none."""
    return getattr(model, name, None) or getattr(model.base_model, name, None)


def _encoded(model: Any, media: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of each sample's forward, with rows in place of pixels where the model takes rows."""
    if not all("pixel_values" in arguments for arguments in media) or not takes(model, _OUTPUTS):
        return [dict(arguments) for arguments in media]
    encode = feature_function(model, "get_image_features")
    assert encode is not None
    names = [name for name in media[0] if name not in MARKS]
    out = encode(**{name: torch.cat([of[name] for of in media]) for name in names}, return_dict=True)
    kept = [{name: value for name, value in of.items() if name not in names or "grid" in name} for of in media]
    parts = [{n: _part(out[n], i) for n in _PER_SAMPLE if out.get(n) is not None} for i in range(len(media))]
    return [{**of, _OUTPUTS: {"image": type(out)(**part)}} for of, part in zip(kept, parts, strict=True)]


def _part(value: Any, index: int) -> Any:
    """Of one picture: a tensor's or a list's entry, in every list of a list of lists."""
    if isinstance(value, list | tuple) and isinstance(value[0], list | tuple):
        return [_part(each, index) for each in value]
    return value[index : index + 1]


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], list | tuple):
        return [torch.cat(parts) for parts in zip(*values, strict=True)]
    return torch.cat(values, dim=1)


class _Given(nn.Module):
    """Stands for the model below the head and returns hidden states that exist."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        return Output(self._hidden)
