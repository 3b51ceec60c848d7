"""A table of sizes gives what its headers and counts give when they are added up by hand."""

from typing import Any

import polars as pl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop.data.shapes import ShapeRules, place
from dflop.data.size_table import ASSUMED_FPS, profile_sizes, read_sizes
from dflop.models.media import MediaHeader
from dflop.records import SampleShape, from_dict

SCHEMA = {
    "id": pl.String, "prompt_tokens": pl.Int32, "response_tokens": pl.Int32, "turns": pl.Int16,
    **{name: pl.List(pl.Int32) for name in ("image_w", "image_h", "video_w", "video_h", "video_frames")},
    **{name: pl.List(pl.Float32) for name in ("video_fps", "video_seconds", "audio_seconds")},
}  # fmt: skip
side = st.integers(0, 900)
image = st.tuples(side, side)
video = st.tuples(
    side, side, st.none() | st.integers(0, 300), st.none() | st.sampled_from([24.0, 30.0]),
    st.none() | st.floats(0, 9, width=16),
)  # fmt: skip


@st.composite
def size_row(draw: st.DrawFn) -> dict[str, Any]:
    images = draw(st.lists(image, max_size=3))
    videos = draw(st.lists(video, max_size=2))
    return {
        "id": draw(st.sampled_from(["a", "b", None])),
        "prompt_tokens": draw(st.none() | st.integers(-1, 50)),
        "response_tokens": draw(st.integers(0, 50)),
        "turns": draw(st.none() | st.integers(0, 3)),
        "image_w": [w for w, _ in images],
        "image_h": [h for _, h in images],
        **{name: [v[i] for v in videos] for i, name in enumerate(list(SCHEMA)[6:11])},
        "audio_seconds": draw(st.lists(st.floats(0, 9, width=16), max_size=2)),
    }


def headers_of(row: dict[str, Any]) -> list[MediaHeader]:
    found = [MediaHeader("image", w, h, 1, 0.0) for w, h in zip(row["image_w"], row["image_h"], strict=True)]
    for w, h, frames, fps, seconds in zip(*(row[name] for name in list(SCHEMA)[6:11]), strict=True):
        rate = fps or ASSUMED_FPS
        duration = seconds if seconds is not None else (frames / rate if frames is not None else 0.0)
        if frames is None:
            frames = max(1, round_half_away(seconds * rate)) if seconds is not None else 0
        found.append(MediaHeader("video", w, h, frames, duration))
    return found + [MediaHeader("audio", 0, 0, 0, s) for s in row["audio_seconds"]]


def round_half_away(x: float) -> int:
    return int(x + 0.5)


def by_hand(
    index: int, row: dict[str, Any], rules: ShapeRules, level: int = 0, first_num_llm: int = 0
) -> SampleShape | str:
    """The obvious way: a shape, or the first thing that is wrong."""
    prompt, response, turns = row["prompt_tokens"], row["response_tokens"], 1 if row["turns"] is None else row["turns"]
    if prompt is None or prompt < 0 or turns < 1:
        return "token counts or turns are missing, negative or not whole"
    items: list[dict[str, Any]] = []
    layout_tokens = 0
    for h in headers_of(row):
        if h.kind == "audio" and h.duration_s <= 0:
            return "audio: no length"
        if h.kind != "audio" and min(h.width_px, h.height_px, h.num_frames) < 1:
            return f"{h.kind}: no size, or no frames"
        if h.kind != "audio" and min(h.width_px, h.height_px) < rules.min_side_px:
            return f"{h.kind}: {h.width_px}x{h.height_px} px, shorter side below min_side_px {rules.min_side_px}"
        try:
            p = place(rules.media, h, len(row["image_w"]), level)
        except ValueError as error:
            return f"{h.kind}: {error}"
        layout_tokens += sum(rules.tokenizer.layout_tokens((part,)) for part in p.layout if isinstance(part, str))
        size = {"kind": h.kind, "path": "", "width_px": h.width_px, "height_px": h.height_px}
        length = {"num_frames": h.num_frames, "duration_s": h.duration_s, "module": p.module, "grid": p.grid}
        work = {"num_tokens": p.num_tokens, "sum_sq_tokens": p.sum_sq_tokens, "num_rows": p.num_rows}
        items.append({**size, **length, **work})
    if response == 0:
        return "no supervised tokens: every answer is empty"
    text, supervised = rules.tokenizer.template_tokens(turns)
    num_text = prompt + response + text + layout_tokens
    num_llm = num_text + sum(i["num_rows"] for i in items)
    if num_llm > rules.max_llm_tokens:
        if rules.overlong and items and level < rules.media.max_level:
            return by_hand(index, row, rules, level + 1, first_num_llm or num_llm)
        tried = f" (after: {', '.join(rules.overlong)})" if rules.overlong else ""
        return f"sample too long: {first_num_llm or num_llm} tokens > max_llm_tokens {rules.max_llm_tokens}{tried}"
    return from_dict(
        SampleShape,
        {
            "profile_key": "key", "sample_index": index, "sample_id": row["id"] or "", "num_text_tokens": num_text,
            "num_supervised_tokens": response + supervised, "num_llm_tokens": num_llm, "items": items,
            "media_level": level, "num_cut_tokens": 0, "weight": 1.0,
        },
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.lists(size_row(), max_size=12), st.sampled_from([30, 90, 400, 5000]), st.sampled_from([(), ("shrink",)]))
@example([], 90, ("shrink",))
def test_a_row_is_what_its_numbers_say(tokenizer, family, rows, limit, overlong):
    rules = ShapeRules("key", family, tokenizer, limit, overlong, min_side_px=5)
    found = profile_sizes(pl.DataFrame(rows, schema=SCHEMA), rules, first_index=7)
    assert [r.sample_index for r in found] == list(range(7, 7 + len(rows)))
    expected = [by_hand(7 + i, row, rules) for i, row in enumerate(rows)]
    assert [r if isinstance(r, SampleShape) else r.reason for r in found] == expected


def test_text_alone_needs_no_media_columns(tokenizer, family, tmp_path):
    path = tmp_path / "sizes.parquet"
    columns = {"id": ["a", "half a token"], "prompt_tokens": [3.0, 3.5], "response_tokens": [2, 2], "other": [1, 1]}
    pl.DataFrame({**columns, "audio_seconds": [None, None]}).write_parquet(path)
    shape, bad = profile_sizes(read_sizes(path), ShapeRules("key", family, tokenizer, 100, ()))
    assert shape.num_supervised_tokens == 3, "the end of the turn is learnt, too"
    assert bad.sample_id == "half a token"
