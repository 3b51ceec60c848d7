from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.annotations import AnnotationFile, BadSample, MediaRef, confine, parse_row
from dflop.errors import ConfigError, DataError
from tests.data.helpers import chat, sample_of

ROWS = [chat("a", "b", id="x"), chat("c", "d", id="é"), chat("e", "f", id=3)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "v1.2.jsonl"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    text = "\n".join(json.dumps(r) for r in ROWS) if ".jsonl" in name else json.dumps(ROWS)
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    file = AnnotationFile.open(tmp_path / name)
    assert [file.row(i) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert [file.sample(i).sample_id for i in range(len(file))] == ["x", "é", "3"]


@given(st.lists(st.sampled_from(["", "  ", '{"id": 1}', '{"é": "\\n"}', "{", "[1]"])), st.booleans())
def test_line_index_agrees_with_splitting(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(("\n".join(lines) + "\n" * end).encode())
    file = AnnotationFile.open(path)
    expected = [line for line in lines if line.strip()]
    assert len(file) == len(expected)
    for index, line in enumerate(expected):
        if line in ("{", "[1]"):
            with pytest.raises(BadSample, match="not"):
                file.row(index)
        else:
            assert file.row(index) == json.loads(line)


def test_unreadable_files_name_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "lines.json").write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match=r"\.jsonl"):
        AnnotationFile.open(tmp_path / "a.csv")
    with pytest.raises(DataError, match="dict"):
        AnnotationFile.open(tmp_path / "object.json")
    with pytest.raises(DataError, match=r"name it \.jsonl"):
        AnnotationFile.open(tmp_path / "lines.json")
    with pytest.raises(DataError, match="absent"):
        AnnotationFile.open(tmp_path / "absent.jsonl")


def test_media_follow_placeholder_order() -> None:
    sample = sample_of("<video> then <image> then <image>", "ok", image=["1.png", "2.png"], videos="v.mp4")
    assert sample.media == (MediaRef("video", "v.mp4"), MediaRef("image", "1.png"), MediaRef("image", "2.png"))


def test_missing_placeholders_go_to_the_front_of_the_first_user_turn() -> None:
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
        ({"id": 1}, "no `conversations`"),
        (chat("\ud800", "x"), "not valid Unicode"),
        (chat("a", "b", image=[3]), "`image` names no file: 3"),
    ],
)
def test_bad_rows_say_why(row: dict[str, object], reason: str) -> None:
    with pytest.raises(BadSample) as caught:
        parse_row(row, 0)
    assert reason in caught.value.reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["id", "image", "images", "video", "audio", "conversations"]), json_values)
    | st.builds(
        lambda turns, image: {"conversations": turns, "image": image},
        st.lists(
            st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "x"]) | json_values, "value": json_values})
        ),
        json_values,
    )
)
def test_any_json_object_is_a_sample_or_bad(row: dict[str, object]) -> None:
    try:
        sample_id = parse_row(row, 0).sample_id
    except BadSample as error:
        sample_id = error.sample_id
    assert sample_id.encode("utf-8") or row.get("id") == ""


def test_paths_stay_under_the_media_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "media", tmp_path / "outside"
    for folder in (root / "sub", outside, tmp_path / "media2"):
        folder.mkdir(parents=True)
    (outside / "x.png").touch()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "sub")
    (root / "loop").symlink_to(root / "loop")
    assert confine(root, "sub/../a.png") == root.resolve() / "a.png"
    assert confine(root, "inner/a.png") == root.resolve() / "sub" / "a.png"
    assert confine(root, "loop").name == "loop"
    for path, reason in {
        "/etc/hostname": "absolute",
        "../outside/x.png": "leaves",
        "../media2/x.png": "leaves",
        "link/x.png": "leaves",
        "a\0b": "impossible",
    }.items():
        with pytest.raises(BadSample, match=reason):
            confine(root, path)
