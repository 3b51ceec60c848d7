"""Keys that are followed, ignored, refused by name, or counted; media whose bytes stand in a row."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.annotations import BadSample, MediaRef
from dflop.data.card import entries_of
from dflop.data.formats.annotation_file import AnnotationFile
from dflop.data.mixture import Dataset, make_entry
from dflop.data.row_keys import FOLLOWED, IGNORED, REFUSED
from dflop.errors import ConfigError
from tests.data.containers import content_of, jsonl_of, write_tar
from tests.data.helpers import chat, parse_row

LEVELS = ("row", "message", "part")


def row_with(level: str, key: str, value: object) -> dict[str, object]:
    """A row with a picture that has a key at some level."""
    part: dict[str, object] = {"type": "image", "image": "1.png"}
    message: dict[str, object] = {"role": "user", "content": [part, {"type": "text", "text": "hi"}]}
    row: dict[str, object] = {"messages": [message, {"role": "assistant", "content": "ok"}]}
    {"row": row, "message": message, "part": part}[level][key] = value
    return row


@pytest.mark.parametrize("level", LEVELS)
def test_keys_that_change_what_is_learnt_are_refused_by_name_or_followed(level):
    refused = REFUSED.keys() - FOLLOWED[level] - ({"name", "channel"} if level == "row" else set())
    assert len(refused) > 80
    for key in sorted(refused):
        row = row_with(level, key, False if key == "label" else ["x", 0.5])
        with pytest.raises(BadSample, match=f"`{key}`") as caught:
            parse_row(row, 0)
        assert caught.value.key == key
        assert parse_row(row, 0, (key,)).unknown_keys == ()
        for nothing in (None, "", [], {}, {"a": None}, "[]"):
            assert parse_row(row_with(level, key, nothing), 0).unknown_keys == ()


EXTENTS = {
    "offset": 2.5, "start": 1, "end": "00:01:30", "start_time": 1.5, "audio_start": 1, "video_end": 9, "begin": 3,
    "onset": 0.5, "clip_start": 1, "timestamp": [1.2, 3.4], "timestamps": 12.5, "segment": [0, 4], "start_frame": 30,
    "endFrame": 90, "frame_idx": 7, "from": 2, "stop_sec": 4, "startTimeMs": 1500, "moment": "1.5-3.0",
    "span": {"start": 1, "end": 2},
    "segment_start_s": 1, "trim": [1, 2], "time_range": [3, 5], "time_offset": 2, "sample_range": [16000, 32000],
    "t_start": 1.5, "start_t": 2, "first_frame": 4, "subclip": [1, 2],
}  # fmt: skip


@pytest.mark.parametrize("key", EXTENTS)
def test_a_part_of_a_recording_is_refused_by_name_wherever_it_is_said(key):
    part: dict[str, object] = {"type": "video", "video": "v.mp4"}
    text = {"type": "text", "text": "hi"}

    def row(in_row: object = None, in_part: object = None, in_value: object = None) -> dict[str, object]:
        value = "v.mp4" if in_value is None else {"path": "v.mp4", key: in_value}
        content = [{**part, "video": value, **({} if in_part is None else {key: in_part})}, text]
        said = [{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}]
        return {"messages": said, **({} if in_row is None else {key: in_row})}

    value = EXTENTS[key]
    for bad in (row(in_row=value), row(in_part=value), row(in_value=value)):
        with pytest.raises(BadSample, match=f"`{key}` .part of a recording") as caught:
            parse_row(bad, 0)
        assert caught.value.key == key
        assert parse_row(bad, 0, (key,)).media
    for whole in (0, 0.0, None, "2024-05-01", "abc", 1.7e9):
        assert parse_row(row(in_row=whole), 0).media
    assert parse_row({**chat("a", "b", image="1.png"), key: value}, 0).media, "a picture has no parts in time"


MASKS = {
    "train_on_input": True, "train_on_inputs": True, "mask_prompt": False, "train_on_prompt": True, "only_last": True,
    "loss_on_last_turn": True, "eot": False, "mask_inputs": False, "assistant_only_loss": False, "loss_mask": [0, 1],
    "attention_mask": [1, 1], "train_on_turn": [1], "roles_to_train": ["all"], "train_on_eos": "all",
    "maskHistory": True, "assistant_masks": [1], "mask_user": False, "last_turn_only": True,
    "completion_only_loss": False, "weights": [0, 1], "turn_weights": [0, 1], "train_last": True,
}  # fmt: skip


@pytest.mark.parametrize("key", MASKS)
@pytest.mark.parametrize("level", ["row", "message"])
def test_masks_of_other_trainers_are_refused_unless_they_say_what_is_done_anyway(level, key):
    with pytest.raises(BadSample, match=f"`{key}` .loss masks"):
        parse_row(row_with(level, key, MASKS[key]), 0)
    if isinstance(MASKS[key], bool):
        assert parse_row(row_with(level, key, not MASKS[key]), 0).unknown_keys == ()


def test_tables_do_not_contradict_each_other():
    assert not IGNORED & REFUSED.keys()
    assert not FOLLOWED["row"] & REFUSED.keys()
    for level, key, value in (("part", "detail", "auto"), ("row", "loss", True), ("row", "label", 3)):
        assert parse_row(row_with(level, key, value), 0).unknown_keys == ()


@settings(max_examples=40)
@given(
    st.sampled_from(LEVELS),
    st.text("abcdefgh_", min_size=1, max_size=12).filter(
        lambda k: not {k} & {*IGNORED, *REFUSED, "name", "ref", "bbox"}
    ),
    st.integers() | st.text("xyz ", min_size=1) | st.lists(st.integers(1), min_size=1, max_size=2),
)
def test_a_key_that_nobody_knows_is_counted_and_changes_nothing(level, key, value):
    plain, other = (parse_row(row_with("row", k, v), 0) for k, v in (("id", "0"), (key, value)))
    if key in FOLLOWED["row"]:
        return
    assert (other.turns, other.media) == (plain.turns, plain.media)
    found = parse_row(row_with(level, key, value), 0).unknown_keys
    assert found == (() if str(value).strip() == "" or key in FOLLOWED[level] else (key,))


@pytest.mark.parametrize(
    "value", ["b.png", ["b.png", "c.JPG"], "data:image/png;base64,xx", {"bytes": "eA==", "path": "x"}]
)
@pytest.mark.parametrize("level", LEVELS)
def test_media_under_a_key_that_is_not_read_are_a_reason(level, value):
    with pytest.raises(BadSample, match="media under `second_view`"):
        parse_row(row_with(level, "second_view", value), 0)
    assert parse_row(row_with(level, "second_view", value), 0, ("second_view",)).media


@pytest.mark.parametrize("key", ["file_name", "url", "source", "image_name"])
def test_where_media_come_from_may_be_said_beside_them_but_not_in_their_place(key):
    assert parse_row(row_with("row", key, "https://x/1.jpg"), 0).media
    for other in (key, "audio_id", "uid", "metadata"):  # under any key of a row that has nothing else
        with pytest.raises(BadSample, match=f"no media, but names some under `{other}`"):
            parse_row({"text": "a cat", other: "https://x/1.jpg"}, 0)
    for value in ("app.ts", "www.example.com.au", "what to do with a .jpg"):
        assert parse_row({"text": "a cat", key: value}, 0).turns


def test_keys_without_which_there_is_no_row_cannot_be_ignored(tmp_path):
    path = jsonl_of([row_with("part", "fps", 1)], tmp_path / "a.jsonl")
    for key in ("messages", "content", "images"):
        with pytest.raises(ConfigError, match=f"{key} cannot be ignored"):
            entries_of(path, tmp_path, ignored_keys=(key,))
    datasets = [Dataset.open(entries_of(path, tmp_path, ignored_keys=keys)) for keys in ((), ("fps",))]
    with pytest.raises(BadSample, match="`fps`"):
        datasets[0].sample(0)
    assert datasets[1].sample(0).media == (MediaRef("image", "1.png"),)
    assert datasets[0].fingerprint() != datasets[1].fingerprint()


@pytest.mark.parametrize("container", ["a.jsonl", "a.json", "a.tar"])
def test_bytes_that_stand_in_a_row_of_json_are_read(tmp_path, media_root, container):
    cat, tone = ((media_root / name).read_bytes() for name in ("cat.png", "tone.flac"))
    text = base64.b64encode(cat).decode()
    uri = f"data:image/png;base64,{text}"
    sound = {"data": base64.b64encode(tone).decode(), "format": "flac"}
    images = [
        uri, text, {"bytes": text, "path": "other.png"}, {"url": uri},
        f"data:image/png,{''.join(f'%{b:02x}' for b in cat)}",
        {"type": "base64", "media_type": "image/png", "data": text},
    ]  # fmt: skip
    rows = [chat("hi", "ok", image=image) for image in images]
    rows += [row_with("part", "image", image) for image in images]
    heard = row_with("row", "id", 0)
    heard["messages"][0]["content"][0] = {"type": "input_audio", "input_audio": sound}  # type: ignore[index]  # a list
    path = tmp_path / container
    if container == "a.tar":
        write_tar(path, [(f"{i}.json", json.dumps(row).encode()) for i, row in enumerate([*rows, heard])])
    else:
        lines = list(map(json.dumps, [*rows, heard]))
        path.write_text("\n".join(lines) if container == "a.jsonl" else f"[{','.join(lines)}]")
    source = Dataset.open([make_entry(str(path), tmp_path, folder=tmp_path)])
    for index in range(len(rows)):
        (ref,) = source.sample(index).media
        assert ref == MediaRef("image", f"{container}#{index}.image.0")
        assert source.open_media(index, ref).read() == cat
        assert source.media_fingerprint(index, ref) == ""
    (ref,) = source.sample(len(rows)).media
    assert source.open_media(len(rows), ref).read() == tone
    with pytest.raises(BadSample, match="no such media item"):
        source.open_media(0, MediaRef("image", f"{container}#7.image.0"))


def test_bytes_that_are_no_base64_say_so(tmp_path):
    file = AnnotationFile(jsonl_of([chat("hi", "ok", image="data:image/png;base64,<>")], tmp_path / "a.jsonl"))
    with pytest.raises(BadSample, match="invalid base64"):
        file.open_media(0, file.sample(0).media[0], tmp_path)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path, media_root, ending):
    rows = [chat("hi", "ok", image="cat.png", id=str(i)) for i in range(3)]
    text = ending.join(map(json.dumps, rows))
    for name, content in {
        "a.jsonl": f"\ufeff{text}",
        "b.jsonl": f"\ufeff{ending}{text}",
        "c.jsonl": text.replace(ending, f"{ending}\ufeff", 1),
        "d.json": f"\ufeff[{','.join(map(json.dumps, rows))}]",
    }.items():
        Path(tmp_path / name).write_bytes(content.encode())
        file = AnnotationFile(tmp_path / name)
        assert [file.sample(i).sample_id for i in range(len(file))] == ["0", "1", "2"]
        assert content_of(file, media_root, 0) == content_of(file, media_root, 0)
