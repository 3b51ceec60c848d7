"""Random pictures, clips and sounds for a shrunk model, in the form that its `get_*_features` asks for by name.

What a class does not state, as the shape of its pixels, is tried: the first form that its encoder runs is taken.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dflop.models.fusing import Float64
from dflop.models.generic.classes import encoder_function, entry_of, feature_function, takes
from dflop.models.generic.folder import reason
from dflop.models.generic.items import rows_of

_MEDIA = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}
_PADDED = {"image_position_ids", "video_position_ids", "spatial_shapes"}
_MASKS = ("feature_attention_mask", "input_features_mask")
_MELS = ("num_mel_bins", "input_dim", "feature_size", "input_feat_size", "audio_embed_dim")
_FRAMES = (400, 128)
"""Frames of sounds; windows of some classes have 100."""
_SECONDS_PER_GRID = 0.5
_HOP = 160
"""Samples of a sound per frame."""
SECONDS = ("second_per_grid_ts", "video_second_per_grid")
"""Arguments of forward passes: seconds per temporal patch."""
Form = tuple[tuple[int, ...], Mapping[str, torch.Tensor]]
"""Shape of the floats of an item, other arguments."""


class NotMade(ValueError):
    """No random item is known for what a model takes."""


@dataclass(frozen=True, slots=True)
class Item:
    """A random item."""

    kind: str
    made: dict[str, Any]
    """What a processor would make of it: tensors, and lists of whole numbers."""
    token: int
    """Placeholder token."""
    num_rows: int
    seconds_per_grid: float
    mark: int = 0
    """Number by which the processor marks its tokens; 0: that of its kind."""


def media_of(model: Any) -> Iterator[str]:
    """Media for which a model has an encoder."""
    return (medium for medium, name in _MEDIA.items() if feature_function(model, name) is not None)


def item_of(model: Any, kind: str, generator: torch.Generator) -> Item:
    """A random item.

    Args:
        model: Small.
        kind: `image`, `video` or `audio`.
        generator: Of its values.

    Raises:
        NotMade: the model takes items of this kind in a form that is not known.
    """
    token, call = token_of(model, kind), call_of(model, kind)
    floats, known = call.parameters[0], {*call.parameters, "image_merge_sizes", "video_merge_sizes"}
    problem = ""
    for shape, more in _forms(model, kind, known):
        made = {floats: torch.randn(shape, generator=generator)}
        made |= {name: value for name, value in more.items() if name in known}
        if missing := call.needed - set(made):
            problem = f"`{_MEDIA[kind]}` takes {', '.join(sorted(missing))}, for which no values are known"
            continue
        try:
            num_rows = call.num_rows(made)
        except Exception as error:  # whatever a tower makes of values in another form
            problem = problem or reason(error)
            continue
        seconds = [name for name in SECONDS if kind == "video" and takes(model, name)]
        made |= {name: torch.tensor([_SECONDS_PER_GRID]) for name in seconds}
        return Item(kind, made, token, num_rows, _SECONDS_PER_GRID if seconds else 0.0)
    raise NotMade(f"its encoder runs no random {kind}: {problem}")


@dataclass(frozen=True, slots=True)
class Call:
    """A model's function for items of a kind."""

    encode: Any
    parameters: tuple[str, ...]
    """Names, that of the floats first."""
    needed: frozenset[str]
    """Parameters without a default."""

    def num_rows(self, made: Mapping[str, Any]) -> int:
        """Rows of an item; whatever else a processor makes is left out."""
        model = self.encode.__self__
        dtype = next(model.parameters()).dtype
        given = {n: x for n, x in as_type(made, dtype).items() if n in self.parameters}
        with torch.no_grad(), Float64() if dtype == torch.float64 else contextlib.nullcontext():
            return len(rows_of(model, self.encode(**given, return_dict=True)))


def as_type(made: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What a processor makes of an item, its floats of a type."""
    return {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in made.items()}


def call_of(model: Any, kind: str) -> Call:
    """The function of a model with an encoder for a kind; that of the model inside where it names no arguments."""
    inside: Any = encoder_function(model.base_model, kind)
    encode: Any = encoder_function(model, kind) or inside
    inner = inspect.signature(inside or encode).parameters
    needed = frozenset(p.name for p in inner.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
    if not needed <= set(wanted := inspect.signature(encode).parameters):  # it hands all on, without names
        encode, wanted = inside, inner
    return Call(encode, tuple(wanted), needed)


def token_of(model: Any, kind: str) -> int:
    """The placeholder of a kind by the config; that of pictures where the class puts clips in its place.

    Raises:
        NotMade: the config names none.
    """
    own, of_pictures = (_named(model.config, of) for of in (kind, "image"))
    if kind == "video" and feature_function(model, _MEDIA[kind]) is None:
        own = of_pictures
    if own is None:
        raise NotMade(f"its config names no `{kind}_token_id`")
    if kind != "video" or of_pictures is None or _is_placeholder(model, own):
        return own
    return of_pictures if _is_placeholder(model, of_pictures) else own


def _named(config: Any, kind: str) -> int | None:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((token for name in names if isinstance(token := entry_of(config, name), int)), None)


def _is_placeholder(model: Any, token: int) -> bool:
    """Whether a class takes a row of a clip for a token, by its own mask; so it does where it has none."""
    look = feature_function(model, "get_placeholder_mask")
    if look is None or "video_features" not in inspect.signature(look).parameters:
        return True
    ids = torch.tensor([[token]])
    embeds = model.get_input_embeddings()(ids)
    try:
        look(ids, inputs_embeds=embeds, video_features=embeds)
    except ValueError:
        return False
    return True


def _forms(model: Any, kind: str, known: set[str]) -> Iterator[Form]:
    section = entry_of(model.config, "audio_config" if kind == "audio" else "vision_config")
    section = section or entry_of(model.config, "encoder_config" if kind == "audio" else "vision_config")
    if section is None:
        raise NotMade(f"its config has no section for {kind}")
    if kind == "audio":
        return _sounds(section)
    frames = 2 if kind == "video" else 1
    if f"{kind}_grid_thw" in known:
        return _native(model, section, kind, frames)
    if known & _PADDED:
        return _padded(section, frames)
    fine = entry_of(model.config, "high_res_vision_config")
    more = {"high_res_pixel_values": torch.ones(1, 3, fine.image_size, fine.image_size)} if fine else {}
    return ((shape, {**of, **more}) for shape, of in _square(section, kind))


def _native(model: Any, vision: Any, kind: str, frames: int) -> Iterator[Form]:
    """At its resolution, patches one behind the other."""
    merge = entry_of(vision, "spatial_merge_size") or 2
    merge = merge if isinstance(merge, int) else 2
    channels, patch = entry_of(vision, "in_channels") or entry_of(vision, "num_channels") or 3, vision.patch_size
    more = {f"{kind}_grid_thw": torch.tensor([[frames, 2 * merge, 3 * merge]])}
    if f"{kind}_merge_sizes" in inspect.signature(model.forward).parameters:
        more[f"{kind}_merge_sizes"] = torch.tensor([merge])
    num, volume = frames * 6 * merge**2, channels * patch**2
    deep = entry_of(vision, "temporal_patch_size") or 1
    return ((shape, more) for shape in ((num, volume * deep), (num, volume * 2), (num, channels, patch, patch)))


def _padded(vision: Any, frames: int) -> Iterator[Form]:
    """The same of patches in a row per picture, with their places or the picture's shape; no padding is needed."""
    side = 2 * (entry_of(vision, "pooling_kernel_size") or 2)
    channels, num = entry_of(vision, "num_channels") or 3, side**2
    patch = entry_of(vision, "model_patch_size") or vision.patch_size
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)[None]
    more = {
        "image_position_ids": places, "video_position_ids": places.expand(frames, -1, -1),
        "num_frames_per_video": torch.tensor([frames]), "spatial_shapes": torch.tensor([[side, side]]),
        "pixel_attention_mask": torch.ones(1, num, dtype=torch.long),
    }  # fmt: skip
    return iter((((frames, num, channels * patch**2), more),))


def _square(vision: Any, kind: str) -> Iterator[Form]:
    """A square picture: one tile, with an axis for tiles, or two tiles behind the whole picture; frames of a clip."""
    stated = entry_of(vision, "image_size") or 0
    side = stated if isinstance(stated, int) else stated[0]
    if kind == "video":
        return (((1, frames, 3, side, side), {}) for frames in (2, 8))
    whole, wide = ({"image_sizes": torch.tensor([[side, width]])} for width in (side, 2 * side))
    tile, marked = (1, 1, 3, side, side), {"pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}
    return iter((((1, 3, side, side), whole), (tile, whole), (tile, marked), ((1, 3, 3, side, side), wide)))


def _sounds(section: Any) -> Iterator[Form]:
    """Frames of a spectrogram, as many as a class states or some; bins first, or last."""
    bins = [n for name in _MELS if isinstance(n := entry_of(section, name), int)][:1] or (80, 128)
    stated = entry_of(section, "max_source_positions")
    for frames in (*_FRAMES, 2 * stated) if isinstance(stated, int) else _FRAMES:
        mask = torch.ones(1, frames, dtype=torch.bool)
        for shape in (shape for mels in bins for shape in ((1, mels, frames), (1, frames, mels))):
            yield shape, dict.fromkeys(_MASKS, mask) | {"padding_mask": mask.repeat(1, _HOP)}
