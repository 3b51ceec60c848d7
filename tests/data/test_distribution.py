from __future__ import annotations

import numpy as np
import pytest

from dflop.data.distribution import group_of, sample_batches, shapes_frame, summary
from dflop.errors import DataError
from dflop.records import MediaItem, SampleShape


def item(kind: str, num_tokens: int) -> MediaItem:
    module = "audio" if kind == "audio" else "vision"
    return MediaItem(kind, "x", 1, 1, 1, 0.0, module, (1, 1, 1), num_tokens, num_tokens**2, num_tokens // 4)


def shape(index: int, *items: MediaItem, num_text_tokens: int = 10) -> SampleShape:
    num_llm_tokens = num_text_tokens + sum(i.num_rows for i in items)
    return SampleShape("key", index, str(index), num_text_tokens, 5, num_llm_tokens, items)


@pytest.mark.parametrize(
    ("kinds", "group"),
    [
        ([], "text"),
        (["image"], "single_image"),
        (["image", "image"], "multi_image"),
        (["video"], "video"),
        (["audio", "audio"], "audio"),
        (["image", "video"], "mixed"),
    ],
)
def test_groups(kinds: list[str], group: str) -> None:
    assert group_of(shape(0, *(item(kind, 4) for kind in kinds))) == group


def test_frame_holds_the_load_of_every_module() -> None:
    frame = shapes_frame([shape(0, item("image", 8), item("image", 4)), shape(1)])
    first, second = frame.rows(named=True)
    assert (first["vision_items"], first["vision_tokens"], first["vision_sum_sq_tokens"]) == (2, 12, 80)
    assert (first["llm_items"], first["llm_tokens"], first["llm_sum_sq_tokens"]) == (1, 13, 169)
    assert (second["group"], second["vision_tokens"], second["llm_tokens"]) == ("text", 0, 10)


def test_summary_agrees_with_numpy() -> None:
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(1, 10_000, 301)]
    shapes = [shape(i, num_text_tokens=n) for i, n in enumerate(lengths)]
    table = summary(shapes_frame([*shapes, shape(301, item("audio", 400))]))
    row = table.row(0, named=True)
    assert (row["group"], row["module"], row["num_samples"], row["max_tokens"]) == ("text", "llm", 301, max(lengths))
    for q in (50, 90, 99):
        assert row[f"p{q}_tokens"] == np.quantile(lengths, q / 100, method="nearest")
    keys = table.select("group", "module").rows()
    assert keys == [("text", "llm"), ("audio", "llm"), ("audio", "audio"), ("all", "llm"), ("all", "audio")]


def test_no_samples_is_an_empty_summary() -> None:
    assert summary(shapes_frame([])).is_empty()


def test_batches_are_drawn_without_replacement_and_by_seed() -> None:
    shapes = [shape(i) for i in range(20)]
    batches = sample_batches(shapes, 8, 5, seed=1)
    assert [len({s.sample_index for s in batch}) for batch in batches] == [8] * 5
    assert batches == sample_batches(shapes, 8, 5, seed=1)
    assert batches != sample_batches(shapes, 8, 5, seed=2)
    assert len(sample_batches(shapes, 100, 1, seed=1)[0]) == 20
    with pytest.raises(DataError, match="no healthy samples"):
        sample_batches([], 8, 1, seed=0)
