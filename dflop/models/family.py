"""What dflop must know about a model family that no config file says: media rules, special tokens, modules.

One small file per family in `families/` implements `Family`. Nothing here imports torch, so the data profiler and
the planner can use it anywhere; `build.py` turns the same description into real modules.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.records import ModuleSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """What one media item becomes: the encoder that takes it, its input grid, and the rows the LLM gets."""

    module: str
    grid: tuple[int, int, int]
    """(temporal, height, width) patches; (feature frames, 0, 0) for audio."""
    num_tokens: int
    """Positions the encoder layers process."""
    sum_sq_tokens: int
    """Sum of squared attention lengths, averaged over the encoder's layers."""
    num_rows: int
    """Rows (placeholder tokens) handed to the LLM."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Special tokens a family writes around a media item: `begin`, then `pad` once per row, then `end`."""

    begin: str
    pad: str
    end: str


@dataclass(frozen=True, slots=True)
class Tower:
    """Where an encoder sits in the Hugging Face model and how it takes a packed group of items."""

    path: str
    """Attribute path of the module; also the prefix of its parameters' names."""
    data_arg: str
    """Forward argument that takes the items' arrays concatenated along `data_axis`."""
    data_axis: int
    size_arg: str
    """Forward argument that takes one row of sizes per item: the first `size_columns` entries of its grid."""
    size_columns: int
    output: str
    """Attribute of the forward result with the rows for the LLM."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Where the language model sits: decoder with `embed_tokens`, `layers` and `norm`, and the head."""

    path: str
    head: str
    rope: str
    """Path of the module whose `get_rope_index` gives multimodal positions; empty for plain positions."""


class Family(abc.ABC):
    """Rules of one model family, bound to one Hugging Face config and one set of media limits.

    Args:
        hf_config: Keyword arguments of the family's Hugging Face config class.
        media: Media limits (`max_pixels`, `video_fps`, ...); unknown keys are an error of the family.
    """

    name: str
    modules: tuple[str, ...]
    """Encoders first, `llm` last."""
    media_tokens: Mapping[str, MediaTokens]
    """Per media kind (`image`, `video`, `audio`) the family accepts."""
    config_class: str
    model_class: str
    """Names in `transformers`."""
    towers: Mapping[str, Tower]
    decoder: Decoder

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        self.hf_config = dict(hf_config)
        self.media = dict(media)

    @property
    def rules_key(self) -> str:
        """Hash of everything that decides an item's placement; part of a data profile's identity."""
        payload = json.dumps([self.name, self.hf_config, self.media], sort_keys=True, default=str)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]

    @abc.abstractmethod
    def specs(self) -> tuple[ModuleSpec, ...]:
        """Modules in the order of `modules`, with parameter counts computed from the config."""

    @abc.abstractmethod
    def place(self, kind: str, *, width_px: int, height_px: int, num_frames: int, duration_s: float) -> Placement:
        """Placement of a media item of the given header size.

        Raises:
            ValueError: the family's processor would refuse the item; the message is the quarantine reason.
        """

    @abc.abstractmethod
    def frame_indices(self, num_frames: int, duration_s: float) -> tuple[int, ...]:
        """Which frames of a video the encoder sees, in order."""

    @abc.abstractmethod
    def item_array(self, kind: str, media: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        """Encoder input of one decoded item, as the family's processor makes it.

        Args:
            kind: `image`, `video` or `audio`.
            media: uint8 frames `[T, H, W, 3]` already resized to the grid, or a float32 waveform `[n]`.
            grid: The item's `Placement.grid`.

        Returns:
            float32 array whose `Tower.data_axis` runs over the item's positions.
        """

    @abc.abstractmethod
    def frame_size_px(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """(height, width) every frame of a visual item is resized to."""

    @abc.abstractmethod
    def array_shape(self, module: str, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Shape of `item_array` for an item of `module`; lets the profiler probe without media."""

    @abc.abstractmethod
    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        """Entries of the Hugging Face config that name the special tokens, given the tokenizer's ids."""

    @abc.abstractmethod
    def shallow(self, module: str, num_layers: int) -> dict[str, Any]:
        """Hugging Face config with `module` cut to `num_layers` and every other module to one layer, for probes."""
