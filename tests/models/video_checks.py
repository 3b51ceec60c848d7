"""A family's video rule held equal to the processor that `ask_processor` asks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dflop.models.media import Layout, MediaHeader, MediaRules, Placement

Ask = Callable[..., dict[str, Any]]

FRAMES_AND_RATES = [
    *itertools.product((1, 2, 3, 7, 8, 32, 900), (0.5, 1.0, 23.976, 30.0)),
    (20_000, 29.97), (31_999, 59.94),
]  # fmt: skip
SIZES = [(640, 360), (1, 1), (8000, 3), (8000, 40), (31, 6000), (3024, 4032), (6000, 4000)]
SMALL_CLIPS = [
    (2, 1.0, 64, 64), (3, 1.0, 100, 40), (7, 24.0, 17, 33), (8, 4.0, 1, 1), (9, 1.0, 45, 44), (11, 3.0, 90, 90),
    (24, 24.0, 130, 260), (31, 10.0, 31, 65),
]  # fmt: skip
"""Frames, frames per second, width and height of videos whose every pixel goes through the processor."""


def place_video(
    rules: MediaRules, width: int, height: int, num_frames: int, duration_s: float, level: int = 0
) -> Placement:
    return rules.place(MediaHeader("video", width, height, num_frames, duration_s), level=level)


def processor_options(rules: MediaRules, level: int = 0) -> dict[str, Any]:
    """Options of the video processor that mean the same as the family's limits."""
    limits = rules.limits(level)
    return {
        "fps": limits["video_fps"], "min_frames": limits["video_min_frames"], "max_frames": limits["video_max_frames"],
        "size": {"shortest_edge": limits["video_min_pixels"], "longest_edge": limits["video_max_pixels"]},
        "cap_pixels_per_frame": limits["cap_pixels_per_frame"], "max_video_tokens": limits["max_video_tokens"],
    }  # fmt: skip


def assert_videos_of_every_length_equal_the_processor(rules: MediaRules, ask: Ask) -> None:
    """From one frame to minutes, at several rates, each in an unusual size and in an ordinary one."""
    for n, (num_frames, fps) in enumerate(FRAMES_AND_RATES):
        for width, height in (SIZES[n % len(SIZES)], (426, 240)):
            assert_video_equals_the_processor(
                rules, ask, width=width, height=height, num_frames=num_frames, duration_s=num_frames / fps
            )


def assert_video_equals_the_processor(
    rules: MediaRules,
    ask: Ask,
    *,
    width: int,
    height: int,
    num_frames: int,
    duration_s: float,
    level: int = 0,
    pixels: bool = False,
) -> None:
    """Same frames, same grid, same text and rows; or refused by both. One frame is what no processor can sample."""
    if num_frames == 1:
        assert rules.frame_indices(1, duration_s, level) == (0, 0)
        try:
            twice = place_video(rules, width, height, 2, 0.1, level)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                place_video(rules, width, height, 1, duration_s, level)
            return
        assert replace(place_video(rules, width, height, 1, duration_s, level), layout=twice.layout) == twice
        return
    said = ask(
        rules.name, options=processor_options(rules, level), pixels=pixels,
        num_frames=num_frames, fps=num_frames / duration_s, width=width, height=height,
    )  # fmt: skip
    if "error" in said:
        with pytest.raises(ValueError, match=rf"{num_frames} video frame|aspect ratio of {width}x{height}"):
            place_video(rules, width, height, num_frames, duration_s, level)
        return
    placed = place_video(rules, width, height, num_frames, duration_s, level)
    frames = rules.frame_indices(num_frames, duration_s, level)
    expected = [i for i in said["indices"] if i < num_frames]
    expected += expected[-1:] * (len(expected) % 2)
    assert list(frames) == expected
    assert list(placed.grid) == said["grid"]
    assert inside(rules, placed.layout) == said["layout"]
    assert placed.num_rows == sum(part for part in said["layout"] if isinstance(part, int))
    assert placed.num_rows * 4 == placed.num_tokens
    assert len(frames) == 2 * placed.grid[0]


def inside(rules: MediaRules, layout: Layout) -> list[str | int]:
    """What the processor puts for the placeholder: `begin` and `end` around it are the template's."""
    tokens = rules.media_tokens["video"]
    if len(layout) == 3:
        assert (layout[0], layout[2]) == (tokens.begin, tokens.end)
        return [layout[1]]
    assert (layout[0], layout[-1]) == (tokens.begin, tokens.end)
    joined: list[str | int] = []
    for is_text, parts in itertools.groupby(layout[1:-1], lambda part: isinstance(part, str)):
        run = list(parts)
        joined += ["".join(map(str, run))] if is_text else run
    return joined
