"""Images and videos placed by a family's rules, in fewer words."""

from __future__ import annotations

from dflop.models.media import MediaRules, Placement
from dflop.records import MediaItem


def place_image(rules: MediaRules, width: int, height: int, *, num_images: int = 1, level: int = 0) -> Placement:
    return rules.place(
        "image", width_px=width, height_px=height, num_frames=1, duration_s=0.0, num_images=num_images, level=level
    )


def item_of(placed: Placement, kind: str, width: int = 0, height: int = 0) -> MediaItem:
    """What was placed, as far as encoder input depends on it."""
    return MediaItem(kind, "", width, height, 1, 0.0, placed.module, placed.grid, 0, 0, placed.num_rows)


def place_frames(rules: MediaRules, num_frames: int, level: int = 0) -> Placement:
    """A video of any size and length, of which only the number of frames matters."""
    return rules.place("video", width_px=640, height_px=480, num_frames=num_frames, duration_s=9.0, level=level)
