import json

import pytest

from dflop.data.annotations import BadSample, MediaRef, Turn
from tests.data.helpers import chat, parse_row, sample_of

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
        {"prompt": "hi", "completion": "ok", "image": "1.png"},
        {"question": "hi", "answer": "ok", "image": "1.png"},
        {"query": "hi", "response": "ok", "images": ["1.png"], "image": None},
        {
            "image": "1.png",
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "ok"}],
        },
        {"messages": json.dumps(parts({"type": "image"}, HI)), "images": ["1.png"]},
        {"messages": parts({"image": "1.png"}, {"text": "\nhi"})},
        {"messages": parts({"type": None, "image": "1.png", "text": None}, {**HI, "image": None})},
        {"messages": parts({"type": "image_url", "value": "1.png"}, {"type": "text", "value": "\nhi"})},
        {"messages": parts({"type": "input_image", "image_url": "1.png"}, {"type": "input_text", "text": "\nhi"})},
        {"messages": parts({"type": "image", "image": {"path": "1.png", "bytes": None}}, HI)},
        chat("hi", "ok", image={"path": "1.png", "bytes": None}),
        chat("hi", "ok", image="1.png", images=["1.png"]),
        chat("<image>\nhi", "ok", images=[None], image="1.png"),
    ],
)
def test_every_way_to_write_it_is_one_conversation(row):
    sample = parse_row(row, 0)
    assert (sample.turns, sample.media) == (TURNS, IMAGE)


def test_media_follow_placeholder_order():
    sample = sample_of("<video> then <image> then <image>", "ok", image=["1.png", "2.png"], videos="v.mp4")
    assert sample.media == (MediaRef("video", "v.mp4"), MediaRef("image", "1.png"), MediaRef("image", "2.png"))


def test_rows_nested_too_deeply_are_bad():
    deep: object = "1.png"
    for _ in range(5000):
        deep = {"url": deep}
    for row in (
        chat("a", "b", image=deep),
        chat("a", "b", x=deep),
        {"messages": parts({"type": "image", "image": deep})},
    ):
        with pytest.raises(BadSample, match="nested too deeply"):
            parse_row(row, 0)


def test_files_named_in_place_leave_the_others_their_order():
    named = {"type": "image", "image": "here.png"}
    row = {"messages": parts({"type": "image"}, named, {"type": "image"}), "images": ["1.png", "2.png", "3.png"]}
    sample = parse_row(row, 0)
    assert sample.turns[0].text == "<image>\n<image><image><image>"
    assert [ref.path for ref in sample.media] == ["1.png", "2.png", "here.png", "3.png"]


def test_missing_placeholders_go_to_the_front_of_the_first_user_turn():
    said = {"system": "be brief", "user": "and <image>?", "assistant": "ok"}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    sample = parse_row({"image": ["1.png", "2.png"], "audio": "a.wav", "messages": messages}, 0)
    assert [t.text for t in sample.turns] == ["be brief", "<image>\n<audio>\nand <image>?", "ok"]
    assert [ref.path for ref in sample.media] == ["1.png", "a.wav", "2.png"]


@pytest.mark.parametrize("text", ["What does <image> mean?", "<image> or <video>: <image>", "<audio>"])
def test_placeholders_are_text_where_no_file_is_left_for_them_in_parts_answers_and_system_prompts(text):
    image = {"type": "image", "image": "1.png"}
    row = {"system": text, "messages": parts(image, {"type": "text", "text": text})}
    row["messages"][1]["content"] = text
    sample = parse_row(row, 0)
    assert sample.media == IMAGE
    assert [turn.pieces() for turn in sample.turns] == [[text], ["", "image", text], [text]]


def test_placeholders_in_a_text_part_take_the_files_that_are_left():
    row = {"messages": parts({"type": "text", "text": "a <image> b <image>"}), "images": ["1.png", "2.png"]}
    sample = parse_row(row, 0)
    assert sample.turns[0].pieces() == ["a ", "image", " b ", "image", ""]
    assert [ref.path for ref in sample.media] == ["1.png", "2.png"]


@pytest.mark.parametrize("mark", [{"loss": False}, {"weight": 0}, {"loss_weight": 0.0}, {"train": False}])
def test_answers_marked_so_are_not_learnt(mark):
    row = chat("a", "wrong", "b", "right")
    row["conversations"][1] |= mark
    assert [turn.has_loss for turn in parse_row(row, 0).turns if turn.role == "assistant"] == [False, True]
    row["conversations"][3] |= mark
    with pytest.raises(BadSample, match="every answer is excluded"):
        parse_row(row, 0)
    for other in ({"loss": 0.5}, {"weight": 2}, {"loss": True, "weight": 0}, {"loss_scale": "1"}):
        row["conversations"][3] = {"from": "gpt", "value": "right", **other}
        with pytest.raises(BadSample, match=f"turn 3 has (`{next(iter(other))}`|conflicting)"):
            parse_row(row, 0)


def test_masked_is_what_is_not_learnt():
    row = chat("a", "wrong", "b", "right")
    for number, is_masked in enumerate((True, True, True, False)):
        row["conversations"][number]["masked"] = is_masked
    assert [turn.has_loss for turn in parse_row(row, 0).turns if turn.role == "assistant"] == [False, True]
    row["conversations"][3]["loss"] = 0
    with pytest.raises(BadSample, match="turn 3 has conflicting loss marks"):
        parse_row(row, 0)
    row["conversations"][0]["masked"] = False
    with pytest.raises(BadSample, match="turn 0 has `masked` False, but only answers carry loss"):
        parse_row(row, 0)


@pytest.mark.parametrize("key", ["text", "caption", "sentence", "transcription", "transcript"])
def test_what_is_said_of_media_is_the_answer(key):
    for kind in ("audio", "image"):
        sample = parse_row({kind: {"path": "1.wav", "bytes": None}, key: "one two", "speaker_id": 7}, 0)
        assert [turn.pieces() for turn in sample.turns] == [["", kind, ""], ["one two"]]
        assert [ref.path for ref in sample.media] == ["1.wav"]
    assert parse_row({**chat("hi", "ok", audio="1.wav"), key: "one two"}, 0).turns[-1].text == "ok"


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_turn_may_be_a_file(kind):
    said = [("User", "text", "Look."), ("user", kind, "1.bin"), ("Assistant", "text", "ok")]
    row = {"conversations": [{"from": who, "type": what, "value": value} for who, what, value in said]}
    sample = parse_row(row, 0)
    assert [turn.pieces() for turn in sample.turns] == [["Look."], ["", kind, ""], ["ok"]]
    assert sample.media == (MediaRef(kind, "1.bin"),)


@pytest.mark.parametrize(
    ("mark", "kind"), [("image", "video"), ("image", "audio"), ("video", "image"), ("audio", "video")]
)
def test_a_placeholder_stands_for_the_one_kind_that_the_row_has_as_many_of(mark, kind):
    sample = sample_of(f"<{mark}> or <{mark}>?", "ok", **{kind: ["1", "2"]})
    assert sample.turns[0].pieces() == ["", kind, " or ", kind, "?"]
    for row in ({kind: ["1", "2", "3"]}, {kind: "1"}):
        with pytest.raises(BadSample, match=f"2 <{mark}> placeholders for 0 {mark} files"):
            sample_of(f"<{mark}> or <{mark}>?", "ok", **row)


def test_of_a_prompt_of_messages_no_answer_is_learnt():
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    turns = parse_row({"prompt": said[:3], "completion": said[3:], "system_prompt": "x"}, 0).turns
    assert [(t.role, t.has_loss) for t in turns if t.role != "user"] == [
        ("system", True), ("assistant", False), ("assistant", True),
    ]  # fmt: skip


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
        (chat("<image>", "see <image>", images=["1.png", "2.png"]), "a file that no user turn holds"),
        ({"messages": parts({"type": "text", "text": "<image> <image>"}), "image": "1.png"}, "1 image files remain"),
        (chat(), "no turns"),
        (chat("hello"), "no assistant turn"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "starts with an assistant turn"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown role 'narrator'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn 0 has no text, but None"),
        ({"conversations": [7]}, "turn 0 is not an object but a int"),
        ({"conversations": "text"}, "not a list but a str"),
        ({"conversations": {"from": ["human"], "value": []}}, "lists of different lengths"),
        ({"id": 1}, "no `conversations`"),
        (chat("\ud800", "x"), "not valid Unicode"),
        (chat("a", "b", image=[3]), "`image` names no file: 3"),
        (chat("a", "b", image="https://x/1.png"), "not from https: URLs"),
        ({"messages": parts({"type": "image", "url": "data:image/png"})}, "not from data: URLs"),
        ({"messages": parts({"type": "image"})}, "1 <image> placeholders for 0 image files"),
        ({"messages": parts({"type": "tool_use"})}, "part of unknown type 'tool_use'"),
        ({"messages": parts("hi")}, "a part that is not an object but a str"),
        ({"messages": parts({"type": "video", "video": ["1.png"]})}, "1 frames of a video but no rate"),
        (chat("a", "b", images=[["1.png", "2.png"]]), "`images` names 2 files in a list where one is expected"),
        (chat("a", "b", images=["1.png", None]), "names no file in place 1"),
        (chat("a", "b", image="1.png", images=["2.png"]), "both `image` and `images`, which differ"),
        (chat("a", "b", image={"bytes": 3, "path": "1.png"}), "`bytes` of type int"),
        ({"messages": parts({"type": "text", "text": "x", "image": "1.png"})}, "type text that also has `image`"),
        ({"messages": parts({"type": "image", "image": "1.png", "text": "x"})}, "type image that also has `text`"),
        ({"messages": parts({"type": "image", "image": "1.png", "path": "2.png"})}, "names several files"),
        ({"messages": parts({"text": "x", "image": "1.png"})}, "without a type that holds image and text"),
        ({"messages": parts({})}, "without a type that holds nothing"),
        ({"messages": "[{"}, "is a string that is not JSON"),
        ({"messages": [{"role": "user", "content": "x", "images": ["1.png"]}]}, "name media in the row or in a part"),
        (chat("a", "b", system="x", system_prompt="y"), "both `system` and `system_prompt`, which differ"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "x"}]}, "both `from` and `role`, which differ"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}, "turn 1 has role 'tool'"),
        ({"conversations": [{"from": "observation", "value": "x"}]}, "tool calls and results"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "tool calls and results"),
        ({"question": "x"}, "`question` but no answer in any of output, completion"),
        ({"question": "x", "query": "y", "answer": "z"}, "both `query` and `question`"),
        ({"question": "x", "answer": "y", "choices": ["a", "b"]}, "`choices` in addition to its question"),
        (
            {**chat("a", "b", "c"), "response": "d"},
            "`response` in addition to `conversations` that end with a question",
        ),
        ({"text": 7}, "`text` has no text"),
        ({"text": "<image> x", "image": "1.png"}, "`text` of a row with media holds placeholders"),
        ({"sentence": "x"}, "`sentence`, but no media"),
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
