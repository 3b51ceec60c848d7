"""How a tower of any model is given a packed group of items, in the forms of `arrays.py`.

A class says by the arguments of its `get_image_features` what it takes besides pixels. Where every such companion
follows from sizes, as grids of patches and sizes of pictures do, all items go in one call, and clips of towers that
take grids go as pictures do, unless the class does more with them (GLM-4.xV, Ernie 4.5). Otherwise each item goes by
its own kind's function, with all that the processor made.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from dflop.errors import ConfigError
from dflop.models.generic import arrays
from dflop.models.generic.arrays import GRID, LISTED, NUM_BYTES, PARTS, SIZED, TILES
from dflop.models.generic.classes import encoder_function
from dflop.models.generic.encoders import PROJECTORS

_OPTIONAL = {
    "pixel_values", "vision_feature_layer", "vision_feature_select_strategy", "return_dict", "output_hidden_states",
    "kwargs", "args", "interpolate_pos_encoding",
}  # fmt: skip


def form_of(shell: Any) -> str:
    """The form in which a model takes packed items: `parts` where companions of pictures do not follow from sizes."""
    encode = getattr(shell, "get_image_features", None)
    takes = set(inspect.signature(encode).parameters) - _OPTIONAL if encode else {"nothing"}
    forms = {("image_grid_thw",): GRID, ("image_sizes",): SIZED, (): TILES, ("pixel_attention_mask",): LISTED}
    form = forms.get(tuple(sorted(takes)), PARTS)
    return PARTS if form == SIZED and hasattr(shell, "image_newline") else form


def form_of_item(shell: Any, kind: str, made: Mapping[str, Any]) -> str:
    """The form in which items of a kind travel from the processor to the tower.

    Args:
        shell: The model above the tower.
        kind: `image`, `video` or `audio`.
        made: What the processor makes of one item; floats may have no values.

    Raises:
        ConfigError: the model needs more of an item than that.
    """
    form = form_of(shell)
    if form == arrays.form_of(kind, made) != PARTS:
        return form
    encode, problem = encoder_function(shell, kind), ""
    needed = inspect.signature(encode).parameters.values() if encode else ()
    missing = [p.name for p in needed if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if encode is None:
        problem = f"{type(shell).__name__} has no `get_{kind}_features`"
    elif missing := [name for name in missing if name not in made]:
        problem = f"`get_{kind}_features` takes {', '.join(missing)}, which the processor does not make"
    elif kind != "audio" and hasattr(shell, "get_rope_index"):
        problem = f"rope positions of {type(shell).__name__} need grids of patches, which the processor does not make"
    if problem:
        raise ConfigError(problem, where="model.hf_config", hint="leave these items out of the data")
    return PARTS


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
        return _of_grids(shell, data, sizes)
    pixels = {"pixel_values": data[None] if form == LISTED else data}
    given = _padded(data, sizes[:, 1:]) if form == SIZED else pixels
    return rows_of(shell, shell.get_image_features(**given, return_dict=True))


def _of_grids(shell: Any, data: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows of grids of patches; clips have a call of their own where they are no pictures to the class."""
    alike = _are_alike(shell)
    kinds = ["video" if frames > 1 and not alike else "image" for frames in sizes[:, 0].tolist()]
    if len(set(kinds)) < 2:
        return _of_kind(shell, max(kinds, default="image"), data, sizes)
    patches, rows = data.split(sizes.prod(1).tolist()), dict[int, torch.Tensor]()
    for kind in ("image", "video"):
        chosen = [n for n, of in enumerate(kinds) if of == kind]
        found = _of_kind(shell, kind, torch.cat([patches[n] for n in chosen]), sizes[chosen])
        num = sizes[chosen].prod(1)
        rows |= zip(chosen, found.split((num * len(found) // num.sum()).tolist()), strict=True)
    return torch.cat([rows[n] for n in range(len(kinds))])


def _of_kind(shell: Any, kind: str, patches: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    given = {arrays.PIXELS[kind]: patches, f"{kind}_grid_thw": sizes.to(patches.device)}
    return rows_of(shell, getattr(shell, f"get_{kind}_features")(**given, return_dict=True))


def _are_alike(shell: Any) -> bool:
    """Whether a class does nothing with the patches of clips but what it does with those of pictures."""
    encode = [getattr(shell, f"get_{kind}_features", None) for kind in ("image", "video")]
    pictures, clips = (set(inspect.unwrap(f).__code__.co_names) if f else set() for f in encode)
    return clips <= pictures | {"get_image_features"}


def features_of_parts(shell: Any, data: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The same of items in the form `parts`, one at a time; the last number of a size is the length of its array."""
    rows = []
    for array in data.split(sizes[:, 2].tolist()):
        kind, made = parts_of(array)
        encode = encoder_function(shell, kind)
        assert encode is not None, "items of a kind without one are refused"
        takes = inspect.signature(encode).parameters
        given = {name: value for name, value in made.items() if name in takes}
        rows.append(rows_of(shell, encode(**given, return_dict=True)))
    return torch.cat(rows)


def parts_of(array: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """(kind, tensors and lists of whole numbers by name) of an item in the form `parts`."""
    start = NUM_BYTES + int.from_bytes(_bytes(array[:NUM_BYTES]), "little")
    kind, what = json.loads(_bytes(array[NUM_BYTES:start]))
    found: dict[str, Any] = {}
    for name, dtype, shape in what:
        end = start + math.prod(shape) * (1 if dtype == "float" else NUM_BYTES)
        x = array[start:end] if dtype == "float" else array[start:end].to(torch.uint8).view(torch.int32).long()
        x = (x.bool() if dtype == "bool" else x).view(shape)
        found[name], start = x.tolist() if dtype == "list" else x, end
    return kind, found


def _bytes(numbers: torch.Tensor) -> bytes:
    return bytes(numbers.to(torch.uint8).tolist())


def rows_of(shell: Any, out: Any) -> torch.Tensor:
    """Rows of an encoder's output, without those of padding.

    Args:
        shell: The model whose function returned it; it projects hidden states where the function does not (Llama 4).
        out: What it returned.
    """
    if out.pooler_output is None:
        parts = (part for name, part in shell.named_children() if any(word in name for word in PROJECTORS))
        rows = next(parts)(out.last_hidden_state.flatten(0, -2))
    else:
        rows = _joined(out.pooler_output)
    if (mask := getattr(out, "attention_mask", None)) is not None:
        rows = rows[mask.flatten().bool()]
    deep = [_joined(each) for each in getattr(out, "deepstack_features", None) or ()]
    return torch.cat([rows, *deep], dim=1) if deep else rows


def _joined(made: Any) -> torch.Tensor:
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
