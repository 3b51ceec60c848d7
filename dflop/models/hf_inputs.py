"""What a family's model in transformers takes for one sample: the arguments that its processor would make.

For a model that answers outside the engine, and for tests that hold the engine against Hugging Face's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dflop.errors import ConfigError
from dflop.models.family import Family, Tower
from dflop.records import MediaItem

Inputs = dict[str, Any]
Group = Sequence[tuple[MediaItem, torch.Tensor]]
"""Items of one tower with their encoder inputs."""
_TYPES = {"image": 1, "video": 2}


def hf_inputs(
    family: Family, input_ids: torch.Tensor, items: Sequence[MediaItem], arrays: Sequence[torch.Tensor],
    positions: Sequence[torch.Tensor],
) -> Inputs:  # fmt: skip
    """Keyword arguments of the model for a batch of one sample.

    Args:
        family: Of the model.
        input_ids: int64 `[tokens]`.
        items: In the order of the sample.
        arrays: Encoder input of each, see `Family.array_of`.
        positions: int64, the positions of the rows of each in the tokens.

    Raises:
        ConfigError: a family without a file of its own, whose inputs only its processor makes.
    """
    inputs: Inputs = {"input_ids": input_ids[None], "attention_mask": torch.ones_like(input_ids)[None]}
    for module, tower in family.towers.items():
        group = [(item, _values(tower, a)) for item, a in zip(items, arrays, strict=True) if item.module == module]
        if group and tower.call not in _OF_TOWERS:
            hint = "ask without media, or export the model and use transformers' processor"
            raise ConfigError(f"a `{family.name}` answers to text alone here", where="model.family", hint=hint)
        if group:
            inputs |= _OF_TOWERS[tower.call](family, group)
    if family.name.endswith("_vl"):
        types = torch.zeros_like(input_ids)
        for item, where in zip(items, positions, strict=True):
            types[where] = _TYPES[item.kind]
        inputs["mm_token_type_ids"] = types[None]
    return inputs


def _values(tower: Tower, array: torch.Tensor) -> torch.Tensor:
    """An encoder input as numbers: pixels may be bytes, which the engine's encoders normalise themselves."""
    if tower.colours is None or array.dtype != torch.uint8:
        return array
    return tower.colours.normalised(array, torch.float32)


def _native(family: Family, group: Group) -> Inputs:
    inputs: Inputs = {}
    if images := [(i, a) for i, a in group if i.kind == "image"]:
        inputs["pixel_values"] = torch.cat([a for _, a in images])
        inputs["image_grid_thw"] = torch.tensor([i.grid for i, _ in images])
    if videos := [(i, a) for i, a in group if i.kind == "video"]:
        inputs["pixel_values_videos"] = torch.cat([a for _, a in videos])
        inputs["video_grid_thw"] = torch.tensor([i.grid for i, _ in videos])
        seconds = torch.tensor([i.duration_s / i.grid[0] for i, _ in videos])
        if "audio" in family.towers:
            inputs["video_second_per_grid"] = seconds
        elif "tokens_per_second" in family.configs["vision"]:
            inputs["second_per_grid_ts"] = seconds
    return inputs


def _anyres(family: Family, group: Group) -> Inputs:
    inputs: Inputs = {}
    if images := [(i, a) for i, a in group if i.kind == "image"]:
        inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence([a for _, a in images], batch_first=True)
        inputs["image_sizes"] = torch.tensor([(i.height_px, i.width_px) for i, _ in images])
        inputs["batch_num_images"] = torch.tensor([len(images)])
    if videos := [a for i, a in group if i.kind == "video"]:
        inputs["pixel_values_videos"] = torch.stack(videos)
    return inputs


def _tiles(family: Family, group: Group) -> Inputs:
    return {"pixel_values": torch.cat([a for _, a in group])}


def _mel(family: Family, group: Group) -> Inputs:
    """Frames `[mel bins, frames]` of each, or windows of them, as long as the longest."""
    frames = [a.reshape(a.shape[-2:]).T for _, a in group]
    features = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True).transpose(1, 2)
    lengths = torch.tensor([item.grid[0] for item, _ in group])
    return {
        "input_features": features,
        "feature_attention_mask": (torch.arange(features.shape[2]) < lengths[:, None]).long(),
    }


_OF_TOWERS: Mapping[str, Callable[[Family, Group], Inputs]] = {
    "native": _native, "anyres": _anyres, "tiles": _tiles, "mel": _mel, "windows": _mel,
}  # fmt: skip
"""By `Tower.call`."""
