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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import polars as pl

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef
from dflop.data.headers import BadMedia
from dflop.data.shapes import Counts, ShapeRules, Tokenizer, shapes_of
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError, DataError
from dflop.models.media import Layout, MediaHeader
from dflop.records import QuarantinedSample, SampleShape

ASSUMED_FPS = 30.0

TEXT_COLUMNS = ("id", "prompt_tokens", "response_tokens")
MEDIA_COLUMNS = {
    "image": ("image_w", "image_h"),
    "video": ("video_w", "video_h", "video_frames", "video_fps", "video_seconds"),
    "audio": ("audio_seconds",),
}
_LISTS = frozenset(column for columns in MEDIA_COLUMNS.values() for column in columns)
_SECONDS = ("video_fps", "video_seconds", "audio_seconds")
_BAD_COUNTS = "token counts or turns are missing, negative or not whole"
_MAX_TOKENS = 2**40
"""Counts above it are none, and would not add up in 64 bits."""
_MAX_FRAMES = 2**62
"""Of a video whose length would give more than fit 64 bits."""


def read_sizes(path: Path) -> pl.DataFrame:
    """The columns this module knows, of a Parquet file.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    known = {*TEXT_COLUMNS, "turns", *(c for columns in MEDIA_COLUMNS.values() for c in columns)}
    try:
        frame = pl.scan_parquet(path)
        names = frame.collect_schema().names()
        found = frame.select([name for name in names if name in known]).collect()
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
    return found.with_columns(*(_numbers(name) for name in found.columns if name != "id"))


def _is_readable(name: str, found: pl.DataType) -> bool:
    if name == "id":
        return not found.is_nested() and found != pl.Binary and found != pl.Object
    inner = found.inner if isinstance(found, pl.List) else found
    is_list = isinstance(found, pl.List) or found == pl.Null
    return (inner == pl.Null or inner.is_numeric()) and (is_list if name in _LISTS else not isinstance(found, pl.List))


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
    """Shapes of all rows, in order, or why a row has none.

    Args:
        sizes: A frame of `read_sizes`.
        rules: Family, tokenizer and limits.
        first_index: `sample_index` of the first row.

    Raises:
        ConfigError: `truncate` is among the steps.
    """
    check_overlong(rules.overlong)
    item = functools.cache(_Item.of)
    rows = [
        (i, _read(i, row, item, rules.max_llm_tokens)) for i, row in enumerate(sizes.iter_rows(named=True), first_index)
    ]
    return shapes_of(rows, replace(rules, tokenizer=_Counter(rules.tokenizer)), lambda _, ref: cast(_Item, ref).read())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item(MediaRef):
    header: MediaHeader

    @classmethod
    def of(cls, *size: Any) -> _Item:
        return cls(size[0], "", header=MediaHeader(*size))

    def read(self) -> MediaHeader:
        """The header, if it says a size."""
        h = self.header
        if h.kind == "audio" and h.duration_s <= 0:
            raise BadMedia("no length")
        if h.kind != "audio" and min(h.width_px, h.height_px, h.num_frames) < 1:
            raise BadMedia("no size, or no frames")
        return h


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row(AnnotatedSample):
    """A row without texts: how many tokens its questions and its answers have, and of how many turns they are."""

    num_prompt_tokens: int
    num_response_tokens: int
    num_turns: int


class _Counter:
    """Counts tokens of rows without texts: those of the row, and what the template and a family write around them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert isinstance(tokenizer, ChatTokenizer)
        self._around_turns = functools.cache(tokenizer.template_tokens)
        self._layout_tokens, self._around_item = tokenizer.layout_tokens, tokenizer.template_tokens_for

    def check(self, sample: AnnotatedSample) -> None:
        """Nothing: there are no texts to refuse."""

    def encode(self, samples: Sequence[AnnotatedSample], layouts: Sequence[Sequence[Layout]]) -> Iterator[Counts]:
        """Counts of every row."""
        for row, of_row in zip(cast(Sequence[_Row], samples), layouts, strict=True):
            around, supervised = self._around_turns(row.num_turns)
            own = sum(map(self._layout_tokens, of_row)) + sum(self._around_item(ref.kind) for ref in row.media)
            num_text = row.num_prompt_tokens + row.num_response_tokens + around + own
            num_rows = sum(entry for layout in of_row for entry in layout if isinstance(entry, int))
            yield Counts(
                num_text + num_rows, num_text, row.num_response_tokens and row.num_response_tokens + supervised
            )


def _read(index: int, row: dict[str, Any], item: Callable[..., _Item], max_turns: int) -> _Row | BadSample:
    sample_id, turns = row["id"] or "", 1 if row.get("turns") is None else row["turns"]
    counts = row["prompt_tokens"], row["response_tokens"]
    # A turn is a token at least: of more turns than tokens fit, a template need not be written out.
    if turns > max_turns:
        reason = f"sample too long: {turns} turns > max_llm_tokens {max_turns}"
        return BadSample(reason, sample_id=sample_id)
    if turns < 1 or any(count is None or not 0 <= count <= _MAX_TOKENS for count in counts):
        return BadSample(_BAD_COUNTS, sample_id=sample_id)
    items: list[_Item] = []
    for kind, columns in MEDIA_COLUMNS.items():
        lists = [row.get(column) or [] for column in columns]
        for column, listed in zip(columns, lists, strict=True):
            if len(listed) != len(lists[0]):
                reason = f"`{columns[0]}` and `{column}` have different numbers of entries"
                return BadSample(reason, sample_id=sample_id)
        sizes = zip(*lists, strict=True)
        items += [item(kind, *_SIZE_OF[kind](*size)) for size in sizes if kind == "audio" or size[0] is not None]
    return _Row(
        index, sample_id, (), tuple(items),
        num_prompt_tokens=counts[0], num_response_tokens=counts[1], num_turns=turns,
    )  # fmt: skip


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
