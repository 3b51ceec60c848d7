"""Shapes of a dataset known by its sizes alone: a Parquet table of lengths, widths, frames and seconds, no media.

Planning a run needs the joint distribution of sizes, not the files: a table of them can be published, mailed, or kept
from a cluster one has left. Its rows go the way of all others (`shapes.py`), with headers and counts from the table.
Text counts are taken as given, so tokens that would merge with the template around them are not.

Columns: `id`, `prompt_tokens`, `response_tokens`, `turns` (question and answer pairs; 1 where there is no such column);
lists with one entry per item: `image_w`, `image_h`, `video_w`, `video_h`, `video_frames`, `video_fps`, `video_seconds`,
`audio_seconds`. Of frames, fps and seconds, one may be null, or two where `ASSUMED_FPS` will do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef
from dflop.data.headers import BadMedia
from dflop.data.shapes import Counts, Media, ShapeRules, media_of, shape_of
from dflop.errors import ConfigError, DataError
from dflop.models.media import MediaHeader
from dflop.records import QuarantinedSample, SampleShape

ASSUMED_FPS = 30.0

TEXT_COLUMNS = ("id", "prompt_tokens", "response_tokens")
MEDIA_COLUMNS = {
    "image": ("image_w", "image_h"),
    "video": ("video_w", "video_h", "video_frames", "video_fps", "video_seconds"),
    "audio": ("audio_seconds",),
}
_LISTS = tuple(column for columns in MEDIA_COLUMNS.values() for column in columns)
_COLUMNS = (*TEXT_COLUMNS, "turns", *_LISTS)
_SECONDS = ("video_fps", "video_seconds", "audio_seconds")
_MAX_TOKENS = 2**40
"""Counts above it are none, and would not add up in 64 bits."""
_MAX_FRAMES = 2**62
"""Most frames of a video; longer ones would not fit 64 bits."""


def read_sizes(path: Path) -> pl.DataFrame:
    """The columns this module knows, of a Parquet file.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    try:
        frame = pl.scan_parquet(path)
        names = frame.collect_schema()
        absent = (name for name in _COLUMNS if names.get(name, pl.Null()) == pl.Null)
        nulls = (pl.lit(None).cast(pl.List(pl.Int64) if name in _LISTS else pl.Int64).alias(name) for name in absent)
        found = frame.with_columns(nulls).select(_COLUMNS).collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"table of sizes cannot be read: {error}", where=str(path)) from error
    missing = [name for name in TEXT_COLUMNS if name not in names]
    for columns in MEDIA_COLUMNS.values():
        if any(name in names for name in columns):
            missing += [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"table of sizes lacks {', '.join(missing)}", where=str(path), hint=f"it has: {', '.join(names)}"
        )
    for name, found_type in found.schema.items():
        if not _is_readable(name, found_type):
            wanted = "a list of numbers" if name in _LISTS else "a number"
            raise DataError(f"column `{name}` of a table of sizes holds {found_type}, not {wanted}", where=str(path))
    return found.with_columns(map(_numbers, found.columns[1:]))


def _is_readable(name: str, found: pl.DataType) -> bool:
    if name == "id":
        return not found.is_nested() and found != pl.Binary and found != pl.Object
    inner = found.inner if isinstance(found, pl.List) else found
    return (inner == pl.Null or inner.is_numeric()) and isinstance(found, pl.List) == (name in _LISTS)


def _numbers(name: str) -> pl.Expr:
    """A column in the type that sizes have; -1, which nothing is, where a number does not fit or is not whole."""
    wanted = pl.Float64() if name in _SECONDS else pl.Int64()

    def fitted(value: pl.Expr) -> pl.Expr:
        number = value.cast(wanted, strict=False)
        fits = number.is_finite() if name in _SECONDS else number.cast(pl.Float64) == value.cast(pl.Float64)
        return pl.when(value.is_null()).then(None).when(fits).then(number).otherwise(pl.lit(-1, wanted))

    if name not in _LISTS:
        return fitted(pl.col(name)).alias(name)
    return pl.col(name).list.eval(fitted(pl.element())).alias(name)


def is_table_of_sizes(path: Path) -> bool:
    """Whether this is a Parquet file of counts without conversations."""
    if path.suffix != ".parquet":
        return False
    try:
        names = set(pl.scan_parquet(path).collect_schema().names())
    except (OSError, pl.exceptions.PolarsError):
        return False  # whoever reads it will say why
    return names >= set(TEXT_COLUMNS) and not names & {"conversations", "messages", "texts", "text"}


def check_overlong(overlong: Sequence[str]) -> None:
    """Refuses what a table of sizes cannot do.

    Raises:
        ConfigError: `truncate` is among the steps.
    """
    if "truncate" in overlong:
        raise ConfigError(
            "a table of sizes cannot be truncated: it does not hold the positions of media",
            where="dataset.overlong",
            hint="use [shrink], or remove `truncate`",
        )


def profile_sizes(
    sizes: pl.DataFrame, rules: ShapeRules, first_index: int = 0
) -> list[SampleShape | QuarantinedSample]:
    """Shapes of all rows, in order, or why a row has none. What rows have in common is placed once.

    Args:
        sizes: A frame of `read_sizes`.
        rules: Family, tokenizer and limits.
        first_index: `sample_index` of the first row.

    Raises:
        ConfigError: `truncate` is among the steps.
    """
    check_overlong(rules.overlong)
    tokenizer = rules.tokenizer
    around_turns = functools.cache(tokenizer.template_tokens)
    around_item = functools.cache(tokenizer.template_tokens_for)

    @functools.cache
    def around_media(media: Media) -> tuple[int, int]:
        own = sum(around_item(ref.kind) for ref in media.sample.media)
        return own + sum(map(tokenizer.layout_tokens, media.layouts)), sum(p.num_rows for p in media.placements)

    def count(prompt: int, response: int, turns: int, media: Media) -> Counts:
        (around, supervised), (own, num_rows) = around_turns(turns), around_media(media)
        num_text = prompt + response + around + own
        return Counts(num_text + num_rows, num_text, response and response + supervised)

    found: list[Any] = [None] * len(sizes)
    turns = pl.col("turns").fill_null(1)
    groups = sizes.with_row_index().group_by(_LISTS).agg("index", "id", "prompt_tokens", "response_tokens", turns)
    for row in groups.iter_rows():
        media = _media(row[: len(_LISTS)], rules)
        for number, sample_id, *counts in zip(*row[len(_LISTS) :], strict=True):
            problem = _problem(rules.max_llm_tokens, *counts) or media
            of_row = functools.partial(count, *counts)
            found[number] = shape_of(first_index + number, sample_id or "", problem, rules, of_row)
    return found


def _problem(max_turns: int, prompt: int | None, response: int | None, turns: int) -> BadSample | None:
    # A turn is a token at least: of more turns than tokens fit, a template need not be written out.
    if turns > max_turns:
        return BadSample(f"sample too long: {turns} turns > max_llm_tokens {max_turns}")
    is_good = turns > 0 and all(count is not None and 0 <= count <= _MAX_TOKENS for count in (prompt, response))
    return None if is_good else BadSample("token counts or turns are missing, negative or not whole")


def _media(lists: Sequence[list[Any] | None], rules: ShapeRules) -> Media | BadSample:
    given, headers = dict(zip(_LISTS, lists, strict=True)), list[MediaHeader]()
    for kind, columns in MEDIA_COLUMNS.items():
        first, *others = (given[column] or [] for column in columns)
        for column, other in zip(columns[1:], others, strict=True):
            if len(other) != len(first):
                return BadSample(f"`{columns[0]}` and `{column}` have different numbers of entries")
        sizes = (size for size in zip(first, *others, strict=True) if kind == "audio" or size[0] is not None)
        headers += [MediaHeader(kind, *_SIZE_OF[kind](*size)) for size in sizes]
    refs, left = tuple(MediaRef(header.kind, "") for header in headers), iter(headers)
    return media_of(AnnotatedSample(0, "", (), refs), rules, lambda *_: _checked(next(left)))


def _checked(header: MediaHeader) -> MediaHeader:
    if header.kind == "audio" and header.duration_s <= 0:
        raise BadMedia("no length")
    if header.kind != "audio" and min(header.width_px, header.height_px, header.num_frames) < 1:
        raise BadMedia("no size, or no frames")
    return header


def _video(
    width_px: int, height_px: int | None, frames: int | None, fps: float | None, seconds: float | None
) -> tuple[int, int, int, float]:
    rate = ASSUMED_FPS if fps is None else fps
    num_frames = frames or 0
    if frames is None and seconds is not None:
        num_frames = math.floor(min(max(seconds * rate, 1.0), _MAX_FRAMES) + 0.5)
    if seconds is None:
        seconds = num_frames / rate if rate else math.inf
    return width_px, height_px or 0, num_frames, seconds


_SIZE_OF: dict[str, Callable[..., tuple[int, int, int, float]]] = {
    "image": lambda width_px, height_px: (width_px, height_px or 0, 1, 0.0),
    "video": _video,
    "audio": lambda seconds: (0, 0, 0, seconds or 0.0),
}
