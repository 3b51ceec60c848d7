"""Rope positions of a sample's tokens, by the rule of its family; `POSITIONS` names them for `Decoder.rope`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dflop.records import MediaItem


class MediaPosition(NamedTuple):
    """What rope positions depend on, per media item of a sample."""

    kind: str
    grid: tuple[int, int, int]
    seconds_per_grid: float
    """Seconds per temporal patch of a video; 0 otherwise."""
    num_rows: int = 0
    """Its placeholders."""

    @classmethod
    def of(cls, item: MediaItem) -> MediaPosition:
        """What rope positions depend on of an item."""
        seconds = item.duration_s / item.grid[0] if item.kind == "video" else 0.0
        return cls(item.kind, item.grid, seconds, item.num_rows)


Positions = Callable[[Any, torch.Tensor, Sequence[MediaPosition]], torch.Tensor]
"""(model without its layers, token ids `[tokens]`, media in order) -> int64 `[axes, tokens]`."""


def plain(shell: Any, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
    """Counted from 0, media like text: `[1, tokens]`."""
    return torch.arange(len(input_ids))[None]


def vision(shell: Any, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
    """Multimodal positions of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: `[3, tokens]`."""
    if not items:
        return torch.arange(len(input_ids)).expand(3, -1)
    ids = shell.config.image_token_id, shell.config.video_token_id
    kinds = sum(number * (input_ids == token).int() for number, token in enumerate(ids, start=1))
    positions, _ = shell.get_rope_index(
        input_ids[None],
        mm_token_type_ids=kinds[None],
        image_grid_thw=_grids(items, "image"),
        video_grid_thw=_grids(items, "video"),
        second_per_grid_ts=torch.tensor([item.seconds_per_grid for item in items if item.kind == "video"]),
    )
    result: torch.Tensor = positions[:, 0]
    return result


def thinker(shell: Any, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
    """Multimodal positions of Qwen2.5-Omni: `[3, tokens]`."""
    if not any(item.kind in ("image", "video") for item in items):
        return torch.arange(len(input_ids)).expand(3, -1)
    audio = [item.grid[0] for item in items if item.kind == "audio"]
    positions, _ = shell.get_rope_index(
        input_ids[None],
        image_grid_thw=_grids(items, "image"),
        video_grid_thw=_grids(items, "video"),
        audio_seqlens=torch.tensor(audio) if audio else None,
        second_per_grids=torch.tensor([item.seconds_per_grid for item in items if item.kind == "video"]),
    )
    result: torch.Tensor = positions[:, 0]
    return result


def _grids(items: Sequence[MediaPosition], kind: str) -> torch.Tensor | None:
    rows = [item.grid for item in items if item.kind == kind]
    return torch.tensor(rows) if rows else None


POSITIONS: Mapping[str, Positions] = {"": plain, "vision": vision, "thinker": thinker}
