"""Two generated mixtures of samples: no data set is read, sizes are drawn and a family's own rules place them.

`main` follows the composition that public summaries of the DFLOP paper give: 65k single images (photographs of
LLaVA-Wild, diagrams of AI2D, infographics), 60k multi-image samples in the manner of M4-Instruct, 60k videos in the
manner of LLaVA-Video, one frame per second, 8 to 64 of them. `heavy` is what a general training set with long tails
looks like: half of it text of up to 32k tokens, 43 % images, 7 % videos of 32 to 128 frames. Sizes and lengths are
lognormal around round numbers chosen here; none was fitted to a data set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflop.models.family import Family
from dflop.models.media import MediaHeader
from dflop.records import MediaItem, SampleShape

MIN_TEXT_TOKENS, MIN_SIDE_PX = 16, 56


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of sample."""

    share: float
    """Relative to the other sources of the mixture."""
    kind: str
    """`image`, `video` or `text`."""
    text_tokens: float
    """Median."""
    text_sigma: float
    num_items: tuple[int, int] = (1, 1)
    """Fewest and most, all alike likely."""
    size_px: tuple[int, int] = (1, 1)
    """Median (width, height)."""
    size_sigma: float = 0.0
    num_frames: tuple[int, int] = (1, 1)
    """Fewest and most, one a second."""
    median_frames: float = 1.0
    frames_sigma: float = 0.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """What global batches are drawn from."""

    name: str
    sources: tuple[Source, ...]

    @property
    def max_frames(self) -> int:
        """The limit that keeps every video's frames."""
        return max(source.num_frames[1] for source in self.sources)


_PHOTO, _SCREEN = (640, 480), (1280, 720)
MAIN = Mixture(
    "main",
    (
        Source(28, "image", 250, 0.6, size_px=_PHOTO, size_sigma=0.4),
        Source(13, "image", 80, 0.4, size_px=(600, 450), size_sigma=0.3),
        Source(24, "image", 60, 0.4, size_px=(1000, 2400), size_sigma=0.5),
        Source(60, "image", 150, 0.7, num_items=(2, 6), size_px=_PHOTO, size_sigma=0.4),
        Source(
            60, "video", 250, 0.8, size_px=_SCREEN, size_sigma=0.3,
            num_frames=(8, 64), median_frames=35, frames_sigma=0.8,
        ),
    ),
)  # fmt: skip
HEAVY = Mixture(
    "heavy",
    (
        Source(50, "text", 700, 1.0),
        Source(28, "image", 200, 0.8, size_px=(900, 700), size_sigma=0.6),
        Source(15, "image", 200, 0.8, num_items=(2, 10), size_px=_PHOTO, size_sigma=0.5),
        Source(
            7, "video", 300, 0.8, size_px=_SCREEN, size_sigma=0.3,
            num_frames=(32, 128), median_frames=72, frames_sigma=0.6,
        ),
    ),
)  # fmt: skip
MIXTURES = {mixture.name: mixture for mixture in (MAIN, HEAVY)}
"""Those of the suites."""


def draw_batches(
    family: Family, mixture: Mixture, *, max_llm_tokens: int, global_batch_size: int, num_batches: int, seed: int
) -> tuple[tuple[SampleShape, ...], ...]:
    """Global batches of fresh samples; a pure function of its arguments.

    Batches of one seed hold the same text and media for every family, placed by the family's rules. What is longer than
    `max_llm_tokens` is shrunk, then truncated, as `dataset.overlong: [shrink, truncate]` has it.
    """
    shares = np.array([source.share for source in mixture.sources])
    batches = []
    for batch in range(num_batches):
        rng = np.random.default_rng([seed, batch])
        picked = rng.choice(len(shares), size=global_batch_size, p=shares / shares.sum())
        samples = [_sample(family, mixture.sources[source], rng, max_llm_tokens) for source in picked]
        first = batch * global_batch_size
        batches.append(
            tuple(replace(s, sample_index=first + i, sample_id=str(first + i)) for i, s in enumerate(samples))
        )
    return tuple(batches)


def _sample(family: Family, source: Source, rng: np.random.Generator, max_llm_tokens: int) -> SampleShape:
    num_text = int(max(MIN_TEXT_TOKENS, source.text_tokens * rng.lognormal(0.0, source.text_sigma)))
    answer_frac = rng.uniform(0.2, 0.8)
    num_items = 0 if source.kind == "text" else int(rng.integers(source.num_items[0], source.num_items[1] + 1))
    sizes = [_size(source, rng) for _ in range(num_items)]
    items: list[MediaItem] = []
    for level in range(family.max_level + 1):
        items = [_item(family, source.kind, size, num_items, level) for size in sizes]
        if num_text + sum(item.num_rows for item in items) <= max_llm_tokens:
            break
    num_rows = sum(item.num_rows for item in items)
    num_text = max(MIN_TEXT_TOKENS, min(num_text, max_llm_tokens - num_rows))
    return SampleShape(
        profile_key="suite",
        sample_index=-1,
        sample_id="",
        num_text_tokens=num_text,
        num_supervised_tokens=max(1, int(num_text * answer_frac)),
        num_llm_tokens=num_text + num_rows,
        items=tuple(items),
    )


def _size(source: Source, rng: np.random.Generator) -> tuple[int, int, int]:
    """(width, height, frames)."""
    # Pictures differ in size more than in shape.
    scale = rng.lognormal(0.0, source.size_sigma)
    aspect = rng.lognormal(0.0, source.size_sigma / 2)
    width, height = source.size_px[0] * scale * aspect, source.size_px[1] * scale / aspect
    num_frames = np.clip(source.median_frames * rng.lognormal(0.0, source.frames_sigma), *source.num_frames)
    return max(MIN_SIDE_PX, int(width)), max(MIN_SIDE_PX, int(height)), int(num_frames)


def _item(family: Family, kind: str, size: tuple[int, int, int], num_items: int, level: int) -> MediaItem:
    header = MediaHeader(kind, *size, 0.0 if kind == "image" else float(size[2]))
    return header.item("", family.place(header, num_items, level))
