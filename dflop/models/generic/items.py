"""How a tower of any model is given a packed group of items, in the forms of `arrays.py`.

A class says by the arguments of its `get_image_features` what it takes beside pixels, and every such companion follows
from sizes: grids of patches, sizes of pictures. Models whose companions do not are refused by name. Clips of towers
that take grids go the same way as pictures.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dflop.errors import ConfigError
from dflop.models.attention import PACKED
from dflop.models.generic.arrays import GRID, LISTED, SIZED, TILES

_OPTIONAL = {
    "pixel_values", "vision_feature_layer", "vision_feature_select_strategy", "return_dict", "output_hidden_states",
    "kwargs", "args", "interpolate_pos_encoding",
}  # fmt: skip


def form_of(shell: Any) -> str:
    """How a model takes pictures.

    Raises:
        ConfigError: in another way.
    """
    encode = getattr(shell, "get_image_features", None)
    takes = set(inspect.signature(encode).parameters) - _OPTIONAL if encode else {"no `get_image_features`"}
    forms = {("image_grid_thw",): GRID, ("image_sizes",): SIZED, (): TILES, ("pixel_attention_mask",): LISTED}
    form = forms.get(tuple(sorted(takes)))
    if form is None or (form == SIZED and hasattr(shell, "image_newline")):
        raise ConfigError(
            f"pictures of {type(shell).__name__} come with {', '.join(sorted(takes))}, which do not follow from sizes",
            where="model.hf_config", hint="use a model that takes pixels with a grid, with sizes, or alone",
        )  # fmt: skip
    return form


def prepare(shell: Any, tower: Any) -> None:
    """Let a tower that is given boundaries of items take the project's packed attention."""
    if form_of(shell) == GRID:
        tower.config._attn_implementation = PACKED


def features(shell: Any, data: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows of packed items, deep features beside them: `[rows, (1 + features) * hidden]`.

    Args:
        shell: The model above the tower, without its decoder.
        data: Items' arrays one behind the other.
        sizes: int64 `[items, 3]` on the host: (temporal, height, width) in patches of a grid, of others (tiles, height,
            width) in pixels.
    """
    form = form_of(shell)
    if form == GRID:
        given = {"pixel_values": data, "image_grid_thw": sizes.to(data.device)}
    elif form == SIZED:
        given = _padded(data, sizes[:, 1:])
    else:
        given = {"pixel_values": data[None] if form == LISTED else data}
    out = shell.get_image_features(**given, return_dict=True)
    rows = _rows(out.pooler_output)
    deep = [_rows(each) for each in getattr(out, "deepstack_features", None) or ()]
    return torch.cat([rows, *deep], dim=1) if deep else rows


def _rows(made: Any) -> torch.Tensor:
    rows: torch.Tensor = torch.cat(list(made)) if isinstance(made, list | tuple) else made
    return rows.flatten(0, -2)


def _padded(data: torch.Tensor, sizes_px: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images from their flat arrays, padded to the largest, and their sizes."""
    num_values = [3 * height * width for height, width in sizes_px.tolist()]
    height, width = sizes_px.amax(0).tolist()
    pixels = data.new_zeros(len(num_values), 3, height, width)
    for image, values, (h, w) in zip(pixels, data.split(num_values), sizes_px.tolist(), strict=True):
        image[:, :h, :w] = values.view(3, h, w)
    return {"pixel_values": pixels, "image_sizes": sizes_px.to(data.device)}
