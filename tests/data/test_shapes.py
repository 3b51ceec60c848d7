from __future__ import annotations

from dflop.data.formats.annotation_file import AnnotationFile
from dflop.data.profile import DatasetRef
from dflop.data.shapes import ShapeRules, shape_of_row
from dflop.data.tokens import ChatTokenizer
from dflop.records import QuarantinedSample, SampleShape
from tests.data.helpers import TinyFamily, WriteRows, chat


def shape(dataset: DatasetRef, family: TinyFamily, index: int = 0) -> SampleShape | QuarantinedSample:
    tokenizer = ChatTokenizer(dataset.tokenizer, family)
    rules = ShapeRules("key", family, tokenizer, dataset.media_root, dataset.max_llm_tokens)
    return shape_of_row(AnnotationFile.open(dataset.annotations), index, rules)


def test_shape_of_each_kind(write_rows: WriteRows, family: TinyFamily, tokenizer: ChatTokenizer) -> None:
    row = chat("<image><video><audio> what?", "cat", id="all", image="cat.png", video="clip.mp4", audio="tone.flac")
    dataset = write_rows([row])
    result = shape(dataset, family)
    assert isinstance(result, SampleShape)
    assert [i.num_rows for i in result.items] == [3 * 2, 1 * 3 * 2, 50]
    assert result.num_llm_tokens == result.num_text_tokens + 62
    sample = AnnotationFile.open(dataset.annotations).sample(0)
    assert len(tokenizer.encode(sample, [i.num_rows for i in result.items]).input_ids) == result.num_llm_tokens


def test_every_refusal_is_a_row_with_its_reason(write_rows: WriteRows, family: TinyFamily) -> None:
    long = "cat " * 3000
    cases: list[tuple[object, str, str]] = [
        (chat("<image>", "x", id="gone", image="gone.png"), "gone.png", "image: file not found"),
        (chat("<image>", "x", id="up", image="../up.png"), "../up.png", "media path leaves the media root"),
        (chat("q", "", id="mute"), "", "no supervised tokens: every answer is empty"),
        (chat(long, "x", id="long"), "", "sample too long"),
        (chat("<audio>" * 40, "x", id="many", audio=["tone.flac"] * 41), "", "sample too long"),
        (chat("<image>", "x", id="wrong", image="tone.flac"), "tone.flac", "image: not an image"),
        (chat("<image>", "x", id="extra"), "", "1 <image> placeholders for 0 image files"),
        ('{"id": "cut"', "", "row at byte"),
    ]
    dataset = write_rows([row for row, _, _ in cases])
    for index, (row, path, reason) in enumerate(cases):
        result = shape(dataset, family, index)
        assert isinstance(result, QuarantinedSample)
        assert (result.sample_index, result.path, result.phase) == (index, path, "profile")
        assert result.reason.startswith(reason)
        assert result.sample_id == (row["id"] if isinstance(row, dict) else "")


def test_media_the_family_does_not_take(write_rows: WriteRows, family: TinyFamily) -> None:
    class ImageFamily(TinyFamily):
        media_tokens = {"image": family.media_tokens["image"]}

    result = shape(write_rows([chat("<audio>", "x", audio="tone.flac")]), ImageFamily({}, {}))
    assert isinstance(result, QuarantinedSample)
    assert result.reason == "family tiny takes no audio (takes: image)"


def test_size_the_family_refuses(write_rows: WriteRows, family: TinyFamily) -> None:
    class PickyFamily(TinyFamily):
        def place(self, kind: str, **size: object) -> object:  # type: ignore[override]  # raises only
            raise ValueError(f"{size['width_px']} px is too narrow")

    result = shape(write_rows([chat("<image>", "x", image="cat.png")]), PickyFamily({}, {}))
    assert isinstance(result, QuarantinedSample)
    assert result.reason == "image: 60 px is too narrow"
