"""Marks of other models become placeholders where they are certain, else refuse their row; other text stays text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.annotations import BadSample
from tests.data.helpers import chat, parse_row

MARKS = [
    "<image_1>", "<image 1>", "<|image_1|>", "<image_placeholder>", "[IMG]", "<start_of_image>", "<|image|>", "<img_0>",
    "<ImageHere>", "<Image>", "{image}", "<image1>", "<IMG_CONTEXT>", "<image_soft_token>", "(<image>./</image>)",
    "<|vision_start|><|image_pad|><|vision_end|>", "<Image><image></Image>", "<img><IMG_CONTEXT><IMG_CONTEXT></img>",
    "<im_image>", "{{image}}", "[image_1]", "<picture_1>", "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_start|>",
    "<Img><ImageHere></Img>", "<img>1.png</img>", "<image>1.png</image>", "<|image_start|><image><|image_end|>", 
    "<photo>",
]  # fmt: skip
OF_OTHER_KINDS = {
    "video": [
        "<video_1>",
        "<|video|>",
        "<VideoHere>",
        "<|vision_start|><|video_pad|><|vision_end|>",
        "<vid>",
        "<image>",
    ],
    "audio": ["<|AUDIO|>", "<SpeechHere>", "<|audio_bos|><|AUDIO|><|audio_eos|>", "<audio>1.png</audio>", "[audio]"],
}


def read(text: str, answer: str = "ok", **row: object) -> tuple[list[str], list[str]]:
    sample = parse_row(chat(text, answer, **row), 0)
    return sample.turns[0].pieces(), [ref.path for ref in sample.media]


@pytest.mark.parametrize("kind", ["image", *OF_OTHER_KINDS])
def test_a_mark_of_any_shape_is_placed_where_it_stands(kind):
    for mark in OF_OTHER_KINDS.get(kind, MARKS):
        found = read(f"First look.\n{mark}\nWhich colour?", **{kind: "1.png"})
        assert found == (["First look.\n", kind, "\nWhich colour?"], ["1.png"]), mark


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<image_1><image_2>", ["", "image", "", "image", ""]),
        ("In <image 1>, and in <image 2>?", ["In ", "image", ", and in ", "image", "?"]),
        ("Compare <Image> with <Image>.", ["Compare ", "image", " with ", "image", "."]),
        ("Picture 1: <img>1.png</img>\n2: <img>2.png</img>", ["Picture 1: ", "image", "\n2: ", "image", ""]),
        ("<image> and <image_2>", ["", "image", " and ", "image", ""]),
        ("<|image_pad|> and `<|image_pad|>`: <|image_pad|>", ["", "image", " and `<|image_pad|>`: ", "image", ""]),
    ],
)  # fmt: skip
def test_several_marks_take_the_files_in_order(text, pieces):
    if text == "<image> and <image_2>":  # numbers must begin where counting begins
        with pytest.raises(BadSample, match="holds <image_2>"):
            read(text, images=["1.png", "2.png"])
        return
    assert read(text, images=["1.png", "2.png"]) == (pieces, ["1.png", "2.png"])


def test_a_path_between_marks_is_the_file_even_where_the_row_has_others():
    assert read("a <img>x.jpg</img> b") == (["a ", "image", " b"], ["x.jpg"])
    found = read("<img>2.png</img> then", images=["1.png", "2.png"])
    assert found == (["", "image", "\n", "image", " then"], ["1.png", "2.png"])


@pytest.mark.parametrize(
    ("text", "answer", "row"),
    [
        ("<image_2> <image_1>", "ok", {"images": ["1.png", "2.png"]}),
        ("<image_1>", "ok", {"images": ["1.png", "2.png"]}),
        ("<image_1> <image_2>", "ok", {"image": "1.png"}),
        ("<image> what is <image_1>?", "ok", {"image": "1.png"}),
        ("what is <|image_1|>?", "ok", {}),
        ("<image>", "see <image_1>", {"image": "1.png"}),
        ("<|vision_start|><|vision_end|>", "ok", {"image": "1.png", "video": "1.mp4"}),
        ("use an {image} here", "ok", {"image": "1.png"}),
        ("<image>\n<ImageHere>\nWhat?", "ok", {"image": "1.png"}),
        ("What is in <image>? [IMG]", "ok", {"image": "1.png"}),
    ],
)
def test_a_mark_that_fits_no_file_for_certain_is_named(text, answer, row):
    with pytest.raises(BadSample, match=r"holds [<{\[].*a mark of another model"):
        read(text, answer, **row)


PROSE = [
    'Write HTML with <img src="a.png"> and <video controls>.', "Use `<img>` or `<|image|>`.",
    "```\n<Image />\n<img_1>\n```", "<audio_file>a</audio_file>",
    "<image_url>x</image_url>", "a [link](image) [see image] {imageless}",
    "<b>picture</b>", "<image1>x</image1>",
]  # fmt: skip


@pytest.mark.parametrize("text", PROSE)
def test_html_code_and_prose_stay_text(text):
    assert read(text) == ([text], [])
    assert read(f"<image>\n{text}", text, image="1.png") == (["", "image", f"\n{text}"], ["1.png"])


@pytest.mark.parametrize(
    "text",
    ["<video>", "use <img>", "<|image_pad|>", "<image_1>", "{image}", "[IMG]", "<|image|>", "<svg><image></svg>"],
)
def test_in_a_row_without_media_answers_are_text_whatever_they_hold(text):
    assert parse_row(chat("How?", text), 0).turns[1].pieces() == [text]
    assert read("<|image_pad|>, <img> or {image}?") == (["<|image_pad|>, <img> or {image}?"], [])


def test_a_mark_around_a_part_that_names_its_file_is_that_file():
    for before, after in (("<Image>", "</Image>"), ("<|vision_start|>", "<|vision_end|>")):
        parts = [("text", f"a {before}"), ("image", "1.png"), ("text", f"{after} b"), ("image", "2.png"), ("text", "c")]
        content = [{"type": kind, kind: value} for kind, value in parts]
        row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}]}
        sample = parse_row(row, 0)
        assert sample.turns[0].pieces() == ["a ", "image", " b", "image", "c"]
        assert [ref.path for ref in sample.media] == ["1.png", "2.png"]


@pytest.mark.parametrize("unit", ["<img>", "<|image_start|>", "<image>", "<img></img>", "<a_img>", "[IMG]", "`<img>"])
def test_a_hostile_text_costs_as_much_as_it_is_long(unit):
    for text in (unit * 8_000, f"{unit * 8_000}{'</img>' * 8_000}"):
        with pytest.raises(BadSample):
            read(text, image="1.png")


@given(st.text("<>[]{}|/ _1`imgevdo.pn", max_size=40))
def test_any_text_is_read_or_refused_and_none_of_it_lost(text):
    for row in ({}, {"image": "1.png"}):
        try:
            pieces, paths = read(text, **row)
        except BadSample:
            continue
        assert len(pieces) == 2 * len(paths) + 1
        assert row or "".join(pieces) == text or paths
