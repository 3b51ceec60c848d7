"""Random pictures for a shrunk model, in the form that its `get_image_features` asks for by the names of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from dflop.models.generic.classes import entry_of
from dflop.models.generic.entry import MARKS, feature_function
from dflop.models.generic.folder import reason

_MEDIA = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}
_OPTIONAL = {"vision_feature_layer", "vision_feature_select_strategy", "return_dict", "kwargs", "args",
             "output_hidden_states", "pixel_mask", "pixel_attention_mask", "vision_aspect_ratio", "batch_num_images",
             "interpolate_pos_encoding", "image_merge_sizes"}  # fmt: skip
_PADDED = {"image_position_ids", "spatial_shapes"}
_BEFORE = 5
"""Tokens in front of the picture."""


class NotMade(ValueError):
    """No random item is known for what a model takes."""


def media_of(model: Any) -> Iterator[str]:
    """Media for which a model has an encoder."""
    return (medium for medium, name in _MEDIA.items() if feature_function(model, name) is not None)


def with_item(
    model: Any, ids: torch.Tensor, medium: str, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, Any]]:
    """(ids with a picture's placeholders in their middle, what the forward takes beside them).

    Args:
        model: Small.
        ids: `[tokens]`.
        medium: `image`; no random items of others are known.
        generator: Of the pixels.

    Raises:
        NotMade: the model takes pictures in a form that is not known.
    """
    encode = feature_function(model, _MEDIA[medium])
    if medium != "image" or encode is None:
        raise NotMade("no random items of this medium are known")
    token = entry_of(model.config, "image_token_id") or entry_of(model.config, "image_token_index")
    if token is None:
        raise NotMade("its config names no `image_token_id`")
    arguments, count = _accepted(model, encode, generator)
    ids = torch.cat([ids[:_BEFORE], torch.full((count,), token), ids[_BEFORE:]])
    is_picture = (ids == token).long()[None]
    takes = inspect.signature(model.forward).parameters
    return ids, arguments | {name: is_picture for name in MARKS if name in takes}


def _accepted(model: Any, encode: Any, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """(arguments of the first form of a picture that a model's encoder runs, rows that it makes of it)."""
    takes = set(inspect.signature(encode).parameters) | {"image_merge_sizes"}
    vision, problem = entry_of(model.config, "vision_config"), ""
    if vision is None:
        raise NotMade("its config has no `vision_config`")
    forms = (
        _native(model, vision) if "image_grid_thw" in takes else _padded(vision) if takes & _PADDED else _square(vision)
    )
    for shape, more in forms:
        arguments = {"pixel_values": torch.randn(shape, generator=generator)}
        arguments |= {name: value for name, value in more.items() if name in takes}
        if missing := takes - set(arguments) - _OPTIONAL:
            raise NotMade(f"`get_image_features` takes {', '.join(sorted(missing))}, for which no values are known")
        try:
            with torch.no_grad():
                rows = encode(**arguments, return_dict=True).pooler_output
        except Exception as error:  # whatever a tower makes of pixels in another form
            problem = reason(error)
            continue
        if rows is None:
            raise NotMade("`get_image_features` returns no `pooler_output`")
        is_list = isinstance(rows, list | tuple)
        return arguments, sum(map(len, rows)) if is_list else rows.flatten(0, -2).shape[0]
    raise NotMade(f"its encoder runs no random picture: {problem}")


def _native(model: Any, vision: Any) -> Iterator[tuple[tuple[int, ...], dict[str, torch.Tensor]]]:
    """(shape of the pixels, other arguments) of a picture at its resolution, patches one behind the other."""
    merge = entry_of(vision, "spatial_merge_size") or 2
    merge = merge if isinstance(merge, int) else 2
    channels, patch = entry_of(vision, "in_channels") or entry_of(vision, "num_channels") or 3, vision.patch_size
    more = {"image_grid_thw": torch.tensor([[1, 2 * merge, 3 * merge]])}
    if "image_merge_sizes" in inspect.signature(model.forward).parameters:
        more["image_merge_sizes"] = torch.tensor([merge])
    num, volume = 6 * merge**2, channels * patch**2
    frames = entry_of(vision, "temporal_patch_size") or 1
    return ((shape, more) for shape in ((num, volume * frames), (num, volume * 2), (num, channels, patch, patch)))


def _padded(vision: Any) -> Iterator[tuple[tuple[int, ...], dict[str, torch.Tensor]]]:
    """The same of patches in a row per picture, with their places or the picture's shape; no padding is needed."""
    side = 2 * (entry_of(vision, "pooling_kernel_size") or 2)
    channels, num = entry_of(vision, "num_channels") or 3, side**2
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)[None]
    more = {
        "image_position_ids": places, "spatial_shapes": torch.tensor([[side, side]]),
        "pixel_attention_mask": torch.ones(1, num, dtype=torch.long),
    }  # fmt: skip
    return iter((((1, num, channels * vision.patch_size**2), more),))


def _square(vision: Any) -> Iterator[tuple[tuple[int, ...], dict[str, torch.Tensor]]]:
    """The same of a square picture: one tile, with an axis for tiles, or two tiles behind the whole picture."""
    stated = entry_of(vision, "image_size") or 0
    side = stated if isinstance(stated, int) else stated[0]
    whole, wide = ({"image_sizes": torch.tensor([[side, width]])} for width in (side, 2 * side))
    return iter((((1, 3, side, side), whole), ((1, 1, 3, side, side), whole), ((1, 3, 3, side, side), wide)))
