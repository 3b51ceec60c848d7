"""Global batches that benches share: of real sizes, and made small enough for models that a CPU trains.

Sizes of samples come from a table of real ones, kinds in stated shares, or are generated.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflop.data.size_table import read_sizes
from dflop.models.family import Family
from dflop.records import MediaItem, SampleShape
from tests.bench.mixtures import HEAVY, Mixture, Source, draw_batches
from tests.gpu.drawn import place

SMALL_SHARES = {"text": 0.3, "image": 0.5, "video": 0.2}
MIN_SMALL_TOKENS, MAX_SMALL_TOKENS, GENERATED_TEXT_FRAC = 8, 256, 0.125
SIDE_FRAC, S_PER_FRAME = 0.25, 8.0
MAX_TAIL_TOKENS, TAIL_TEXT_FRAC = 2048, 0.25
UNCUT_TOKENS, MAX_GENERATED_TOKENS = 1 << 30, 32_768


def real_batch(
    family: Family, shares: Mapping[str, float], num_samples: int, max_llm_tokens: int, seed: Sequence[int], sizes: Path
) -> tuple[SampleShape, ...]:
    """Rows of a table of sizes; within a kind all sources are alike likely, and so are a source's samples."""
    rng, rows = np.random.default_rng(seed), _rows(sizes)
    found: list[SampleShape] = []
    while len(found) < num_samples:
        kind = str(rng.choice(list(shares), p=list(shares.values())))
        source = rows[kind][int(rng.integers(len(rows[kind])))]
        shape = _shape(family, source[int(rng.integers(len(source)))], len(found), max_llm_tokens)
        if shape is not None:
            found.append(shape)
    return tuple(found)


@functools.cache
def _rows(sizes: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Rows by kind and source; a source is what an id names before its slash."""
    kinds = (
        pl.when(pl.col("video_seconds").list.len() > 0).then(pl.lit("video"))
        .when(pl.col("audio_seconds").list.len() > 0).then(pl.lit("audio"))
        .when(pl.col("image_w").list.len() > 0).then(pl.lit("image"))
        .otherwise(pl.lit("text"))
    )  # fmt: skip
    rows = read_sizes(sizes).with_columns(kind=kinds, source=pl.col("id").str.split("/").list.first())
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for (kind, _), of_source in sorted(rows.group_by("kind", "source"), key=lambda group: str(group[0])):
        found.setdefault(str(kind), []).append(of_source.sort("id").to_dicts())
    return found


def _shape(family: Family, row: Mapping[str, Any], index: int, max_llm_tokens: int) -> SampleShape | None:
    """The row as the family sees it, shrunk and then cut to the limit; None: an image smaller than one patch."""

    def of(*columns: str) -> list[tuple[Any, ...]]:
        return list(zip(*(row[column] or [] for column in columns), strict=False))

    media = [("image", int(w), int(h), 1, 0.0) for w, h in of("image_w", "image_h")]
    media += [
        ("video", int(w), int(h), max(1, round(2 * s)), s)
        for w, h, s in of("video_w", "video_h", "video_seconds")
        if w and s
    ]
    if "audio" in {spec.module for spec in family.specs()}:
        media += [("audio", 0, 0, 0, s) for (s,) in of("audio_seconds") if s]
    num_text = max(1, (row["prompt_tokens"] or 0) + (row["response_tokens"] or 0))
    items: list[MediaItem] = []
    for level in range(family.max_level + 1):
        try:
            items = [place(family, *m, num_images=len(media), level=level) for m in media]
        except ValueError:
            return None
        if num_text + sum(i.num_rows for i in items) <= max_llm_tokens:
            break
    num_rows = sum(i.num_rows for i in items)
    num_text = max(1, min(num_text, max_llm_tokens - num_rows))
    num_supervised = max(1, min(row["response_tokens"] or 0, num_text))
    return SampleShape("bench", index, str(index), num_text, num_supervised, num_text + num_rows, tuple(items))


def small_batch(
    family: Family, num_samples: int, seed: int, sizes: Path | None, first_index: int = 0
) -> list[SampleShape]:
    """Samples made small enough for a tiny model on one core.

    Who has media, how many, and how sizes go together is kept: text is clipped, pictures are shown at a quarter of
    their sides, videos at a frame every eight seconds. Audio is left out. Indices count from `first_index`.
    """
    if sizes:
        drawn, text_frac = real_batch(family, SMALL_SHARES, num_samples, UNCUT_TOKENS, (seed,), sizes), 1.0
    else:
        (drawn,) = draw_batches(
            family, HEAVY, max_llm_tokens=MAX_GENERATED_TOKENS, global_batch_size=num_samples, num_batches=1, seed=seed
        )
        text_frac = GENERATED_TEXT_FRAC
    return [_small(family, shape, index, text_frac) for index, shape in enumerate(drawn, first_index)]


def small_texts(
    family: Family, num_samples: int, seed: int, sizes: Path | None, first_index: int = 0
) -> list[SampleShape]:
    """Texts whose lengths keep their tail: real ones a quarter as long, generated ones an eighth."""
    if sizes:
        drawn, frac = real_batch(family, {"text": 1.0}, num_samples, UNCUT_TOKENS, (seed,), sizes), TAIL_TEXT_FRAC
    else:
        texts = Mixture("texts", (Source(1, "text", 700, 1.0),))
        (drawn,) = draw_batches(
            family, texts, max_llm_tokens=UNCUT_TOKENS, global_batch_size=num_samples, num_batches=1, seed=seed
        )
        frac = GENERATED_TEXT_FRAC
    found = []
    for index, shape in enumerate(drawn, first_index):
        n = min(max(round(shape.num_text_tokens * frac), MIN_SMALL_TOKENS), MAX_TAIL_TOKENS)
        num_supervised = min(max(1, round(n * shape.num_supervised_tokens / shape.num_text_tokens)), n - 1)
        found.append(SampleShape("bench", index, str(index), n, num_supervised, n, ()))
    return found


def small_media(
    family: Family, num_samples: int, seed: int, sizes: Path | None, first_index: int = 0
) -> list[SampleShape]:
    """Of small samples those with pictures or videos; four are drawn for one, so indices have gaps."""
    drawn = small_batch(family, 4 * num_samples, seed, sizes, first_index=4 * first_index)
    return [shape for shape in drawn if shape.items][:num_samples]


def _small(family: Family, shape: SampleShape, index: int, text_frac: float) -> SampleShape:
    seen = [i for i in shape.items if i.kind != "audio"]
    items = tuple(
        place(
            family, i.kind, max(1, int(i.width_px * SIDE_FRAC)), max(1, int(i.height_px * SIDE_FRAC)),
            max(1, round(i.duration_s / S_PER_FRAME)), i.duration_s, num_images=len(seen),
        )
        for i in seen
    )  # fmt: skip
    least = MIN_SMALL_TOKENS + 2 * len(items)  # a medium stands between two tokens
    num_text = min(max(round(shape.num_text_tokens * text_frac), least), MAX_SMALL_TOKENS)
    answer_frac = shape.num_supervised_tokens / shape.num_text_tokens
    num_supervised = min(max(1, round(num_text * answer_frac)), num_text - 1)  # one token carries no loss
    num_rows = sum(i.num_rows for i in items)
    return SampleShape("bench", index, str(index), num_text, num_supervised, num_text + num_rows, items)
