"""How a model family turns media into encoder work and LLM tokens: the part of a family the data profiler needs.

A family's rules are pure functions of a media item's header (size, frames, seconds) and of its limits, and equal what
the family's Hugging Face processor does. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.records import MediaItem

MIN_COUNT, MAX_COUNT = 2**-20, 2**32
"""Nothing a model's config states comes near them, and products of a few stay what a float can hold."""

VISUAL_SETTINGS: Mapping[str, Any] = {
    "do_resize": True,
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
}
"""What every processor of pictures and videos does; 3 is bicubic."""

Layout = tuple[str | int, ...]
"""What stands for one media item in the token sequence: text (special tokens are written by name) and, as numbers,
how many pad tokens follow."""


@dataclass(frozen=True, slots=True)
class MediaHeader:
    """Size of one media item; fields a kind does not have are 0."""

    kind: str
    """`image`, `video` or `audio`."""
    width_px: int
    height_px: int
    num_frames: int
    """Frames in the container; 1 for an image."""
    duration_s: float

    def item(self, path: str, placed: Placement) -> MediaItem:
        """The item of a sample that it becomes."""
        return MediaItem(
            self.kind, path, self.width_px, self.height_px, self.num_frames, self.duration_s,
            placed.module, placed.grid, placed.num_tokens, placed.sum_sq_tokens, placed.num_rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """What one media item becomes: the encoder that takes it, its input grid, and the rows the LLM gets."""

    module: str
    grid: tuple[int, int, int]
    """(temporal, height, width) patches; (feature frames, 0, 0) for audio. Families that cut an image into tiles of
    one size: (tiles or frames, height, width) patches of a tile."""
    num_tokens: int
    """Positions the encoder layers process."""
    sum_sq_tokens: int
    """Sum of squared attention lengths, averaged over the encoder's layers."""
    num_rows: int
    """Rows (placeholder tokens) handed to the LLM."""
    layout: Layout
    """Layout of rows; the numbers add up to `num_rows`."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Special tokens a family writes around a media item: `begin`, then `pad` once per row, then `end`."""

    begin: str
    pad: str
    end: str
    placeholder: str = ""
    """What the processor replaces in the text of a chat template by `begin` and what follows it; empty where it
    replaces `pad` alone, and the template writes `begin` and `end` around it."""

    @property
    def in_text(self) -> str:
        """What stands for an item in a text of its own, as Hugging Face's processors take it."""
        return self.placeholder or f"{self.begin}{self.pad}{self.end}"

    @property
    def in_template(self) -> str:
        """What stands for an item in the text of a chat template."""
        return self.placeholder or self.pad

    def in_its_place(self, layout: Layout) -> Layout:
        """The part of an item's layout that the processor puts there; what is left of it is the template's."""
        return layout if self.placeholder else layout[bool(self.begin) : len(layout) - bool(self.end)]

    def wrap(self, num_rows: int) -> Layout:
        """Layout of an item that is one run of rows."""
        return (*filter(None, [self.begin]), num_rows, *filter(None, [self.end]))


def check_like(value: object, default: object, where: str) -> None:
    """Refuse a value of a model's or a processor's config that is not what its default is: a count, a flag, a name.

    Args:
        value: As it was stated.
        default: What it is where nothing is stated; None: anything goes.
        where: Key, for the error.

    Raises:
        ConfigError: it is of another kind, no positive number, or too large for what is computed from it.
    """
    if isinstance(default, bool):
        wanted, is_fine = "true or false", isinstance(value, bool)
    elif isinstance(default, int | float):
        wanted = "a positive whole number" if isinstance(default, int) else "a positive number"
        is_fine = _is_count(value, whole=isinstance(default, int))
    elif isinstance(default, tuple):
        wanted = "a list of layers"
        is_fine = isinstance(value, list | tuple) and all(v == 0 or _is_count(v, whole=True) for v in value)
    else:
        wanted, is_fine = "text", default is None or isinstance(value, str)
    if not is_fine:
        raise ConfigError(f"`{str(value)[:60]}` is not {wanted}", where=where, hint=f"{default} by default")


def _is_count(value: object, *, whole: bool) -> bool:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    return is_number and MIN_COUNT < value < MAX_COUNT  # type: ignore[operator]  # a number by the line above


class MediaRules(abc.ABC):
    """Rules of one model family, bound to one Hugging Face config and one set of media limits.

    Args:
        hf_config: Keyword arguments of the family's Hugging Face config class; only what differs from its defaults.
        media: Media limits that differ from `media_defaults`.

    Raises:
        ConfigError: a media limit the family does not know.
    """

    name: str
    media_tokens: Mapping[str, MediaTokens]
    """Per media kind (`image`, `video`, `audio`) the family accepts."""
    refused: Mapping[str, str] = {}
    """Media kinds that this model in particular does not take -> why."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that layouts use besides those of `media_tokens`."""
    media_defaults: Mapping[str, Any]
    """Every media limit and the value it has where the configuration is silent."""
    settings: Mapping[str, Mapping[str, str]] = {}
    """Per media kind: entries of the processor's settings -> media limits. Of entries of one limit the last one stated
    counts; `size.longest_edge` is an entry of `size`."""
    shrinkable: Mapping[str, int] = {}
    """Limits that halve when a sample has to get shorter, and the least value of each."""

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        for key in media:
            if key not in self.media_defaults:
                raise ConfigError(
                    f"unknown media limit `{key}`",
                    where=f"model.media.{key}",
                    hint=did_you_mean(key, self.media_defaults),
                )
            # A limit of 0 leaves nothing, which its family says in its own words; areas are divided by.
            if "pixels" in key or media[key] != 0:
                check_like(media[key], self.media_defaults[key], f"model.media.{key}")
        self.hf_config = dict(hf_config)
        self.media = {**self.media_defaults, **media}

    @property
    def rules_key(self) -> str:
        """Hash of everything that decides an item's placement; part of a data profile's identity."""
        payload = json.dumps([self.name, self.hf_config, self.media], sort_keys=True, default=str)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]

    def place(self, header: MediaHeader, num_images: int = 1, level: int = 0) -> Placement:
        """Placement of a media item.

        Args:
            header: Of the item.
            num_images: Of its sample; some families treat several images differently from one.
            level: How many times the limits of `shrinkable` are halved.

        Raises:
            ValueError: the family's processor would refuse the item; the message is the quarantine reason.
        """
        if header.kind not in self.media_tokens:
            raise ValueError(self.refusal(header.kind))
        if header.kind != "audio" and min(header.width_px, header.height_px) < 1:
            raise ValueError(f"size {header.width_px}x{header.height_px} is empty")
        return self._place(header, num_images, level)

    def refusal(self, kind: str) -> str:
        """Why items of a kind outside `media_tokens` are not taken."""
        takes = ", ".join(sorted(self.media_tokens)) or "text only"
        why = f": {self.refused[kind]}" if kind in self.refused else f" (supported: {takes})"
        return f"{self.name} does not support {kind}{why}"

    @abc.abstractmethod
    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        """`place` of a kind that the family takes."""

    def sum_sq_llm_tokens(self, num_tokens: int) -> int:
        """Squared attention length of a sample in the language model, averaged over its layers; 0: its square."""
        return 0

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        """Which frames of a video the encoder sees, in order.

        Raises:
            ValueError: the family takes no video, or none of this length.
        """
        raise ValueError(f"{self.name} does not support video")

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        """Entries of the processor's settings that are what they are here: value, or None where it has to be absent."""
        return {} if kind == "audio" else VISUAL_SETTINGS

    def limits(self, level: int) -> Mapping[str, Any]:
        """Media limits after halving those of `shrinkable` `level` times."""
        if level == 0:
            return self.media
        # A limit that a person set below the least stays where it is.
        halved = {
            key: max(min(least, self.media[key]), int(self.media[key]) >> level)
            for key, least in self.shrinkable.items()
        }
        return {**self.media, **halved}

    @property
    def max_level(self) -> int:
        """First level at which every limit of `shrinkable` is at its least."""
        level = 0
        while any(int(self.media[key]) >> level > least for key, least in self.shrinkable.items()):
            level += 1
        return level
