from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.annotations import BadSample, MediaRef, Turn
from dflop.data.conversation import parse_row
from tests.data.helpers import chat, sample_of

TURNS = (Turn("user", "<image>\nhi"), Turn("assistant", "ok"))
IMAGE = (MediaRef("image", "1.png"),)


def parts(*of_user: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(of_user)}, {"role": "assistant", "content": "ok"}]


HI = {"type": "text", "text": "\nhi"}


@pytest.mark.parametrize(
    "row",
    [
        chat("hi", "ok", image="1.png"),
        chat("<image>\nhi", "ok", images=["1.png"]),
        {"messages": [{"role": "user", "content": "hi"}, {"role": "model", "content": "ok"}], "image": "1.png"},
        {"conversations": None, "messages": parts({"type": "image"}, HI), "images": ["1.png"]},
        {"messages": parts({"type": "image", "image": "1.png"}, HI)},
        {"messages": parts({"type": "image_url", "image_url": {"url": "file://1.png"}}, HI)},
        {"messages": parts({"type": "image", "path": "1.png", "text": None}, {**HI, "path": None})},
        {"texts": [{"user": "hi", "assistant": "ok", "source": "x"}], "images": ["1.png"]},
        {"conversations": {"from": ["human", "gpt"], "value": ["hi", "ok"]}, "image": "1.png"},
        {"instruction": "hi", "input": "", "output": "ok", "images": ["1.png"]},
    ],
)
def test_every_way_to_write_it_is_one_conversation(row):
    sample = parse_row(row, 0)
    assert (sample.turns, sample.media) == (TURNS, IMAGE)


def test_media_follow_placeholder_order():
    sample = sample_of("<video> then <image> then <image>", "ok", image=["1.png", "2.png"], videos="v.mp4")
    assert sample.media == (MediaRef("video", "v.mp4"), MediaRef("image", "1.png"), MediaRef("image", "2.png"))


def test_files_named_in_place_leave_the_others_their_order():
    named = {"type": "image", "image": "here.png"}
    row = {"messages": parts({"type": "image"}, named, {"type": "image"}), "images": ["1.png", "2.png", "3.png"]}
    sample = parse_row(row, 0)
    assert sample.turns[0].text == "<image>\n<image><image><image>"
    assert [ref.path for ref in sample.media] == ["1.png", "2.png", "here.png", "3.png"]


def test_missing_placeholders_go_to_the_front_of_the_first_user_turn():
    row = {
        "image": ["1.png", "2.png"],
        "audio": "a.wav",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "and <image>?"},
            {"role": "assistant", "content": "ok"},
        ],
    }
    sample = parse_row(row, 0)
    assert [t.text for t in sample.turns] == ["be brief", "<image>\n<audio>\nand <image>?", "ok"]
    assert [ref.path for ref in sample.media] == ["1.png", "a.wav", "2.png"]


def test_system_string_is_the_first_turn_unless_there_is_one():
    assert sample_of("hi", "ok", system="be brief").turns[0] == Turn("system", "be brief")
    row = {"system": "no", "conversations": [{"from": "system", "value": "yes"}, *chat("hi", "ok")["conversations"]]}
    assert [t.text for t in parse_row(row, 0).turns] == ["yes", "hi", "ok"]


def test_alpaca_with_input_and_history():
    row = {"instruction": "add", "input": "1 2", "output": "3", "history": [["hi", "hello"]]}
    assert [t.text for t in parse_row(row, 0).turns] == ["hi", "hello", "add\n1 2", "3"]


def test_plain_text_is_one_turn_and_keeps_what_looks_like_a_placeholder():
    sample = parse_row({"text": "<rss><image></rss>", "id": None}, 7)
    assert (sample.sample_id, sample.turns, sample.media) == ("7", (Turn("text", "<rss><image></rss>"),), ())
    assert parse_row({**chat("hi", "ok"), "text": "not this"}, 0).turns[0].text == "hi"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat("<image><image>", "x", image="1.png"), "2 <image> placeholders for 1 image files"),
        (chat("hello", "see <image>", image="1.png"), "media belong to user turns"),
        (chat(), "no turns"),
        (chat("hello"), "no assistant turn"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "starts with an assistant turn"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown role 'narrator'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn 0 has no text: its value is None"),
        ({"conversations": [7]}, "turn 0 is not an object but a int"),
        ({"conversations": "text"}, "not a list but a str"),
        ({"conversations": {"from": ["human"], "value": []}}, "lists of different lengths"),
        ({"id": 1}, "no `conversations`"),
        (chat("\ud800", "x"), "not valid Unicode"),
        (chat("a", "b", image=[3]), "`image` names no file: 3"),
        (chat("a", "b", image="https://x/1.png"), "not from https: addresses"),
        ({"messages": parts({"type": "image", "url": "data:image/png;base64,xx"})}, "not from data: addresses"),
        ({"messages": parts({"type": "image"})}, "1 <image> placeholders for 0 image files"),
        ({"messages": parts({"type": "tool_use"})}, "part of unknown type 'tool_use'"),
        ({"messages": parts("hi")}, "a part that is not an object but a str"),
        ({"messages": parts({"type": "video", "video": ["1.png"]})}, "video part that names no file"),
        ({"text": 7}, "`text` has no text"),
        ({"text": "x", "image": "1.png"}, "takes no media"),
        ({"instruction": "x", "output": None}, "turn 1 has no text"),
        ({"instruction": "x", "input": 3, "output": "y"}, "`input` has no text"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "not a list of pairs"),
        (chat("a", "b", system=["x"]), "`system` has no text"),
    ],
)
def test_bad_rows_say_why(row, reason):
    with pytest.raises(BadSample) as caught:
        parse_row(row, 0)
    assert reason in caught.value.reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
part_values = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "video_url"]) | json_values},
    optional={"text": json_values, "image": json_values, "url": json_values, "video_url": json_values},
)
turn_values = st.fixed_dictionaries(
    {"from": st.sampled_from(["human", "gpt", "x"]) | json_values, "value": json_values | st.lists(part_values)}
)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(
            ["id", "image", "images", "video", "conversations", "text", "instruction", "history", "system"]
        ),
        json_values,
    )
    | st.builds(
        lambda turns, image: {"conversations": turns, "image": image}, st.lists(turn_values), json_values | st.just("a")
    )
)
def test_any_json_object_is_a_sample_or_bad(row):
    try:
        sample = parse_row(row, 0)
    except BadSample as error:
        sample_id, names = error.sample_id, [error.reason]
    else:
        sample_id, names = sample.sample_id, [ref.path for ref in sample.media]
    assert sample_id.encode("utf-8") or row.get("id") == ""
    assert all(names)
