"""Shapes of a dataset known by its sizes alone: a Parquet table of lengths, widths, frames and seconds, no media.

Planning a run needs the joint distribution of sizes, not the files: a table of them can be published, mailed, or kept
from a cluster one has left. The work is done column by column: a size is placed once however often it occurs
(364,091 rows of real datasets hold 25,033 different sizes), and the rest is joins. Text counts are taken as given, so
tokens that would merge with the template around them are not.

Columns: `id`, `prompt_tokens`, `response_tokens`, `turns` (question and answer pairs; 1 where there is no such column);
lists with one entry per item: `image_w`, `image_h`, `video_w`, `video_h`, `video_frames`, `video_fps`, `video_seconds`,
`audio_seconds`. Of frames, fps and seconds, one may be null, or two where `ASSUMED_FPS` will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from dflop.data.shapes import ShapeRules, place, too_small
from dflop.errors import ConfigError, DataError
from dflop.models.media import MediaHeader

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
_SIZE = ("kind", "width_px", "height_px", "num_frames", "duration_s", "num_images")
_ITEM = (
    "kind", "path", "width_px", "height_px", "num_frames", "duration_s", "module", "grid", "num_tokens",
    "sum_sq_tokens", "num_rows",
)  # fmt: skip
_PLACED: dict[str, pl.DataType | type[pl.DataType]] = {
    "module": pl.String, "grid": pl.List(pl.Int64), "num_tokens": pl.Int64, "sum_sq_tokens": pl.Int64,
    "num_rows": pl.Int64, "num_layout_tokens": pl.Int64, "reason": pl.String,
}  # fmt: skip


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


def profile_sizes(sizes: pl.DataFrame, rules: ShapeRules, first_index: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Shapes of all rows, in order.

    Args:
        sizes: A frame of `read_sizes`.
        rules: Family, tokenizer and limits.
        first_index: `sample_index` of the first row.

    Returns:
        Columns of `SampleShape` and of `QuarantinedSample`; every row is in one of the two.

    Raises:
        ConfigError: `truncate` is not among the steps this can do without texts.
    """
    check_overlong(rules.overlong)
    rows = _texts(sizes, rules, first_index)
    items = _items(sizes, first_index)
    found = _measured(rows, items, rules, 0)
    max_level = rules.media.max_level if "shrink" in rules.overlong else 0
    done = []
    for level in range(1, max_level + 1):
        long = _is_long(rules) & pl.col("reason").is_null() & (pl.col("num_items") > 0)
        done.append(found.filter(~long))
        again = found.filter(long).select("sample_index")
        if again.is_empty():
            found = again.join(found, on="sample_index")
            break
        found = _measured(
            rows.join(again, on="sample_index", how="semi"), items.join(again, on="sample_index", how="semi"),
            rules, level,
        )  # fmt: skip
    found = pl.concat([*done, found]).sort("sample_index")
    return _split(found, rules)


def _texts(sizes: pl.DataFrame, rules: ShapeRules, first_index: int) -> pl.DataFrame:
    turns = pl.col("turns").cast(pl.Int64) if "turns" in sizes.columns else pl.lit(1, pl.Int64)
    rows = sizes.select(
        _sample_index(first_index),
        pl.col("id").cast(pl.String).fill_null("").alias("sample_id"),
        pl.col("prompt_tokens").cast(pl.Int64),
        pl.col("response_tokens").cast(pl.Int64),
        turns.fill_null(1).alias("turns"),
        _uneven(sizes.columns).alias("uneven"),
    )
    # A turn is a token at least: of more turns than tokens fit, a template need not be written out.
    most = rules.max_llm_tokens
    template = [(n, *rules.tokenizer.template_tokens(n)) for n in rows["turns"].unique().to_list() if 0 < n <= most]
    columns = {"turns": pl.Int64, "text": pl.Int64, "supervised": pl.Int64}
    added = pl.DataFrame(template, schema=columns, orient="row")
    rows = rows.join(added, on="turns", how="left", maintain_order="left")
    counts = (pl.col("prompt_tokens"), pl.col("response_tokens"))
    bad = pl.col("text").is_null() | pl.any_horizontal(*(~c.is_between(0, _MAX_TOKENS) for c in counts))
    many = pl.when(pl.col("turns") > most).then(
        pl.format("sample too long: {} turns > max_llm_tokens {}", "turns", most)
    )
    given = pl.col("prompt_tokens") + pl.col("response_tokens")
    return rows.select(
        "sample_index",
        "sample_id",
        (given + pl.col("text")).fill_null(0).alias("num_text_tokens"),
        pl.when(pl.col("response_tokens") > 0)
        .then(pl.col("response_tokens") + pl.col("supervised"))
        .otherwise(0)
        .fill_null(0)
        .alias("num_supervised_tokens"),
        pl.coalesce(many, pl.when(bad | given.is_null()).then(pl.lit(_BAD_COUNTS)), "uneven").alias("text_reason"),
    )


def _uneven(columns: Sequence[str]) -> pl.Expr:
    """Why a row's lists are not one entry per item; null where they are."""
    found = [pl.lit(None, pl.String)]
    for first, *others in MEDIA_COLUMNS.values():
        for other in others if first in columns else ():
            differ = pl.col(other).list.len().fill_null(0) != pl.col(first).list.len().fill_null(0)
            found.append(pl.when(differ).then(pl.lit(f"`{first}` and `{other}` have different numbers of entries")))
    return pl.coalesce(*found)


def _items(sizes: pl.DataFrame, first_index: int) -> pl.DataFrame:
    """One row per media item in order of sample, kind and place: its header."""
    indexed = sizes.with_columns(_sample_index(first_index)).filter(_uneven(sizes.columns).is_null())
    frames = []
    for order, (kind, columns) in enumerate(MEDIA_COLUMNS.items()):
        if columns[0] not in sizes.columns:
            continue
        num_images = pl.col("image_w").list.len().cast(pl.Int64) if kind == "image" else pl.lit(1, pl.Int64)
        lists = [pl.col(column).fill_null([]) for column in columns]
        items = indexed.select("sample_index", num_images.alias("num_images"), *lists).explode(
            *columns, empty_as_null=False
        )
        items = items.filter(pl.col(columns[0]).is_not_null() | pl.lit(kind == "audio"))
        frames.append(items.select("sample_index", "num_images", pl.lit(order).alias("order"), *_header_columns(kind)))
    if not frames:
        empty = {"sample_index": pl.Int64, "num_images": pl.Int64, "kind": pl.String}
        return pl.DataFrame(schema={**empty, **dict.fromkeys(_SIZE[1:4], pl.Int64), "duration_s": pl.Float64})
    return pl.concat(frames).sort("sample_index", "order", maintain_order=True).drop("order")


def _sample_index(first: int) -> pl.Expr:
    return pl.int_range(first, first + pl.len(), dtype=pl.Int64).alias("sample_index")


def _header_columns(kind: str) -> list[pl.Expr]:
    zero = pl.lit(0, pl.Int64)
    if kind == "audio":
        size, frames, duration = [zero, zero], zero, pl.col("audio_seconds").cast(pl.Float64).fill_null(0)
    else:
        size = [pl.col(f"{kind}_w").cast(pl.Int64).fill_null(0), pl.col(f"{kind}_h").cast(pl.Int64).fill_null(0)]
        frames, duration = pl.lit(1, pl.Int64), pl.lit(0.0)
    if kind == "video":
        fps = pl.col("video_fps").cast(pl.Float64).fill_null(ASSUMED_FPS)
        given_s, given = pl.col("video_seconds").cast(pl.Float64), pl.col("video_frames").cast(pl.Int64)
        frames = given.fill_null((given_s * fps).round().clip(1, _MAX_FRAMES).cast(pl.Int64)).fill_null(0)
        duration = given_s.fill_null(given / fps).fill_null(0)
    return [
        pl.lit(kind).alias("kind"),
        size[0].alias("width_px"),
        size[1].alias("height_px"),
        frames.alias("num_frames"),
        duration.alias("duration_s"),
    ]


def _measured(rows: pl.DataFrame, items: pl.DataFrame, rules: ShapeRules, level: int) -> pl.DataFrame:
    """Rows with their items placed at a level: lengths, and why there is none."""
    different = items.select(_SIZE).unique()
    placed = [_placed(rules, MediaHeader(*size[:5]), size[5], level) for size in different.iter_rows()]
    table = different.hstack(pl.DataFrame(placed, schema=_PLACED, orient="row"))
    full = items.join(table, on=list(_SIZE), how="left", maintain_order="left").with_columns(path=pl.lit(""))
    per_row = full.group_by("sample_index", maintain_order=True).agg(
        pl.struct(_ITEM).alias("items"),
        pl.len().cast(pl.Int64).alias("num_items"),
        pl.col("num_rows").sum().alias("num_rows"),
        pl.col("num_layout_tokens").sum().alias("num_layout_tokens"),
        pl.col("reason").drop_nulls().first().alias("item_reason"),
    )
    joined = rows.join(per_row, on="sample_index", how="left", maintain_order="left")
    text = pl.col("num_text_tokens") + pl.col("num_layout_tokens").fill_null(0)
    silent = pl.when(pl.col("num_supervised_tokens") == 0).then(pl.lit("no supervised tokens: every answer is empty"))
    return joined.select(
        "sample_index",
        "sample_id",
        text.alias("num_text_tokens"),
        "num_supervised_tokens",
        (text + pl.col("num_rows").fill_null(0)).alias("num_llm_tokens"),
        pl.col("items").fill_null(pl.lit([], pl.List(full.select(pl.struct(_ITEM)).dtypes[0]))),
        pl.lit(level, pl.Int64).alias("media_level"),
        pl.lit(0, pl.Int64).alias("num_cut_tokens"),
        pl.lit(1.0).alias("weight"),
        pl.col("num_items").fill_null(0),
        pl.coalesce("item_reason", "text_reason", silent).alias("reason"),
    )


def _placed(
    rules: ShapeRules, header: MediaHeader, num_images: int, level: int
) -> tuple[str | None, list[int], int, int, int, int, str | None]:
    try:
        _check(rules, header)
        p = place(rules.media, header, num_images, level)
    except ValueError as error:
        return None, [0, 0, 0], 0, 0, 0, 0, str(error)
    layout_tokens = rules.tokenizer.layout_tokens(p.layout) + rules.tokenizer.template_tokens_for(header.kind)
    return p.module, list(p.grid), p.num_tokens, p.sum_sq_tokens, p.num_rows, layout_tokens, None


def _check(rules: ShapeRules, header: MediaHeader) -> None:
    if header.kind not in rules.media.media_tokens:
        takes = ", ".join(sorted(rules.media.media_tokens)) or "text only"
        raise ValueError(f"family {rules.media.name} does not support {header.kind} (supported: {takes})")
    if header.kind == "audio" and header.duration_s <= 0:
        raise ValueError("audio: no length")
    if header.kind != "audio" and min(header.width_px, header.height_px, header.num_frames) < 1:
        raise ValueError(f"{header.kind}: no size, or no frames")
    if (problem := too_small(header, rules)) is not None:
        raise ValueError(problem)


def _is_long(rules: ShapeRules) -> pl.Expr:
    return pl.col("num_llm_tokens") > rules.max_llm_tokens


def _split(found: pl.DataFrame, rules: ShapeRules) -> tuple[pl.DataFrame, pl.DataFrame]:
    tried = f" (after: {', '.join(rules.overlong)})" if rules.overlong else ""
    too_long = pl.format(
        "sample too long: {} tokens > max_llm_tokens {}" + tried, "num_llm_tokens", pl.lit(rules.max_llm_tokens)
    )
    reason = pl.coalesce("reason", pl.when(_is_long(rules)).then(too_long))
    found = found.with_columns(reason.alias("reason"), profile_key=pl.lit(rules.profile_key))
    shapes = found.filter(pl.col("reason").is_null()).select(
        "profile_key", "sample_index", "sample_id", "num_text_tokens", "num_supervised_tokens", "num_llm_tokens",
        "items", "media_level", "num_cut_tokens", "weight",
    )  # fmt: skip
    bad = found.filter(pl.col("reason").is_not_null()).select(
        "profile_key", "sample_index", "sample_id", pl.lit("profile").alias("phase"), pl.lit("").alias("path"),
        "reason", pl.lit("").alias("run_id"), pl.lit(-1, pl.Int64).alias("step"),
    )  # fmt: skip
    return shapes, bad
