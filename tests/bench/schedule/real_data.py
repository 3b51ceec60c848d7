"""Samples of the real steps: rows of a table of sizes, made small enough for a tiny model on one core.

What makes packing hard is kept: who has media and how many, how lengths and sizes spread and go together. Text is
clipped, pictures are shown at a fraction of their sides, videos at a frame every few seconds. Audio is left out: the
model has no ears. Where no table is given, rows are drawn from the generated mixture with long tails, its text
shortened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflop.data.sizes import ASSUMED_FPS, read_sizes
from dflop.jobs.suite.mixtures import HEAVY, draw_batches
from dflop.models.family import Family
from dflop.records import MediaItem, SampleShape

MAX_TEXT_TOKENS, MIN_TEXT_TOKENS = 256, 8
SIDE_FRAC = 0.25
S_PER_FRAME = 8.0
GROUP_SHARES = {"text": 0.30, "image": 0.35, "images": 0.15, "video": 0.20}
"""Of a drawn batch; a table of sizes says nothing about the proportions in which its rows are trained."""
NUM_GENERATED, GENERATED_TEXT_FRAC = 2000, 0.125


@dataclass(frozen=True)
class Row:
    """One sample as the table has it, before it is made small."""

    num_prompt: int
    num_answer: int
    """Text tokens, the latter supervised."""
    media: tuple[tuple[str, int, int, float], ...]
    """(kind, width in pixels, height, seconds) of each image or video."""

    @property
    def group(self) -> str:
        if not self.media:
            return "text"
        return "video" if self.media[0][0] == "video" else "image" if len(self.media) == 1 else "images"


class Rows:
    """Rows by group, to draw batches from.

    Args:
        sizes: Parquet file as `dflop/data/sizes.py` reads it; None: generated rows.
        family: Places the media.
    """

    def __init__(self, sizes: Path | None, family: Family) -> None:
        self._family = family
        self._rows: dict[str, list[Row]] = {}
        for row in _generated(family) if sizes is None else _read(sizes):
            self._rows.setdefault(row.group, []).append(row)
        self._shares = {g: s for g, s in GROUP_SHARES.items() if g in self._rows}

    def batch(self, num_samples: int, seed: Sequence[int], first_index: int = 0) -> list[SampleShape]:
        """Samples drawn by `GROUP_SHARES`; a pure function of the arguments. Indices count from `first_index`."""
        rng, total = np.random.default_rng(seed), sum(self._shares.values())
        groups = rng.choice(list(self._shares), num_samples, p=[s / total for s in self._shares.values()])
        rows = [self._rows[g][rng.integers(len(self._rows[g]))] for g in groups]
        return [small_shape(row, self._family, index) for index, row in enumerate(rows, first_index)]


def small_shape(row: Row, family: Family, index: int) -> SampleShape:
    """Shape of a row made small; prompt and answer are clipped in proportion."""
    wanted = max(row.num_prompt + row.num_answer, 1)
    num_text = min(max(wanted, MIN_TEXT_TOKENS), MAX_TEXT_TOKENS)
    items = tuple(_item(family, *media, num_images=len(row.media)) for media in row.media)
    return SampleShape(
        profile_key="bench", sample_index=index, sample_id=str(index), num_text_tokens=num_text,
        num_supervised_tokens=min(max(1, round(num_text * row.num_answer / wanted)), num_text - 1),
        items=items, num_llm_tokens=num_text + sum(i.num_rows for i in items),
    )  # fmt: skip


def _item(family: Family, kind: str, width: int, height: int, duration_s: float, *, num_images: int) -> MediaItem:
    size: dict[str, Any] = {
        "width_px": max(1, round(width * SIDE_FRAC)), "height_px": max(1, round(height * SIDE_FRAC)),
        "num_frames": max(1, round(duration_s / S_PER_FRAME)), "duration_s": duration_s,
    }  # fmt: skip
    placed = family.place(kind, **size, num_images=num_images)
    return MediaItem(
        kind=kind, path="", **size, module=placed.module, grid=placed.grid, num_tokens=placed.num_tokens,
        sum_sq_tokens=placed.sum_sq_tokens, num_rows=placed.num_rows,
    )  # fmt: skip


def _read(sizes: Path) -> Iterator[Row]:
    for row in read_sizes(sizes).iter_rows(named=True):
        if row.get("audio_seconds") and not row.get("video_w"):
            continue
        media = [("image", w, h, 0.0) for w, h in _zipped(row, "image_w", "image_h")]
        for w, h, frames, fps, seconds in _zipped(
            row, "video_w", "video_h", "video_frames", "video_fps", "video_seconds"
        ):
            media.append(("video", w, h, seconds or (frames or 0) / (fps or ASSUMED_FPS)))
        if all(w and h for _, w, h, _ in media):
            yield Row(row["prompt_tokens"] or 0, row["response_tokens"] or 0, tuple(media))


def _zipped(row: dict[str, Any], *columns: str) -> Iterator[tuple[Any, ...]]:
    lists = [row.get(column) or [] for column in columns]
    return zip(*lists, strict=True)


def _generated(family: Family) -> Iterator[Row]:
    (batch,) = draw_batches(
        family, HEAVY, max_llm_tokens=1 << 15, global_batch_size=NUM_GENERATED, num_batches=1, seed=0
    )
    for s in batch:
        media = tuple((i.kind, i.width_px, i.height_px, i.duration_s) for i in s.items)
        num_text, num_answer = (round(n * GENERATED_TEXT_FRAC) for n in (s.num_text_tokens, s.num_supervised_tokens))
        yield Row(num_text - num_answer, num_answer, media)
