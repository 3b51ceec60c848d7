"""What dflop must know about a model family that no config file says: its media rules (`media.py`) and its modules.

One small file per family in `families/` implements `Family`. Nothing here imports torch, so the data profiler and
the planner can use it anywhere; `build.py` turns the same description into real modules.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.models.media import MediaRules
from dflop.records import ModuleSpec


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


class Family(MediaRules):
    """A family that can be built and trained: its media rules, and where its modules are."""

    modules: tuple[str, ...]
    """Encoders first, `llm` last."""
    config_class: str
    model_class: str
    """Names in `transformers`."""
    towers: Mapping[str, Tower]
    decoder: Decoder

    @abc.abstractmethod
    def specs(self) -> tuple[ModuleSpec, ...]:
        """Modules in the order of `modules`, with parameter counts computed from the config."""

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
