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
