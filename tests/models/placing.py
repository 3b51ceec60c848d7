"""Images and videos placed by a family's rules, in fewer words."""

from __future__ import annotations

from dflop.models.media import MediaHeader, MediaRules, Placement
from dflop.records import MediaItem


def place_image(rules: MediaRules, width: int, height: int, *, num_images: int = 1, level: int = 0) -> Placement:
    return rules.place(MediaHeader("image", width, height, 1, 0.0), num_images, level)


def item_of(placed: Placement, kind: str, width: int = 0, height: int = 0) -> MediaItem:
    """What was placed, as far as encoder input depends on it."""
    return MediaHeader(kind, width, height, 1, 0.0).item("", placed)


def place_frames(rules: MediaRules, num_frames: int, level: int = 0) -> Placement:
    """A video of any size and length, of which only the number of frames matters."""
    return rules.place(MediaHeader("video", 640, 480, num_frames, 9.0), level=level)
