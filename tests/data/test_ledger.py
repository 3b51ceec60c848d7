"""Whatever key or text names a media file that exists: it is placed, its row is refused, or it is counted by key."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.annotations import BadSample
from dflop.data.dataset_profile import DatasetRef, profile_key, profile_shard
from dflop.data.ledger import MediaFolder, names_in
from dflop.data.mixture import Dataset, MixtureEntry
from dflop.data.row_keys import IGNORED
from tests.data.containers import jsonl_of, parquet_of, write_tar
from tests.data.helpers import WriteRows, chat

FILES = ["cat.png", "clip.mp4", "tone.flac", "two words.png", "sub/dog.jpg", "UPPER.JPG"]
TEXT = chat("hi", "ok")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A media root with `FILES`, empty ones: nothing here reads them."""
    root = tmp_path_factory.mktemp("media")
    (root / "sub").mkdir()
    for name in FILES:
        (root / name).touch()
    return root


def outcome(row: dict[str, Any], root: Path, path: Path) -> tuple[str, object]:
    dataset = Dataset.open([MixtureEntry("x", (jsonl_of([row], path),), root)])
    try:
        sample = dataset.sample(0)
    except BadSample as error:
        return "refused", error.reason
    if (unplaced := dataset.unplaced(0, sample)) is not None:
        return "counted", unplaced
    return "placed", tuple(ref.path for ref in sample.media)


def shapes(name: str, root: Path) -> dict[str, dict[str, Any]]:
    """Forty ways to write a row that names a file."""
    part = {"type": "image", "image": "other.png"}
    user = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "ok"}
    prompt = {"prompt": "hi", "completion": "ok"}

    def messages(*of_user: object, **row: object) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(of_user)}, answer], **row}

    ignored = ["audio_id", "image_id", "uid", "source", "file_name", "caption", "markdown", "title", "question_id"]
    return {
        **{f"text-only row, {key}": {**TEXT, key: name} for key in ignored},
        **{f"row with a picture, {key}": chat("hi", "ok", image="other.png", **{key: name}) for key in ignored},
        "id": {**TEXT, "id": name},
        "nested": {**TEXT, "metadata": {"source": {"file": name}}},
        "list": chat("hi", "ok", image="other.png", extra=[{"a": [name]}]),
        "json in a string": chat("hi", "ok", image="other.png", metadata=json.dumps({"sound": name})),
        "unknown key": {**TEXT, "second": name},
        "user's text": chat(f"Look at {name}.", "ok"),
        "answer": chat("hi", f"see ({name})"),
        "markdown": chat(f"![x]({name}) what?", "ok"),
        "html": chat(f'<img src="{name}"> what?', "ok"),
        "address": chat(f"file://{root}/{name} what?", "ok"),
        "Qwen's pair": chat(f"<img>{name}</img> what?", "ok"),
        "absolute": {**TEXT, "original_path": f"{root}/{name}"},
        "another machine's": {**TEXT, "metadata": {"path": f"/data/other/{name}"}},
        "message key": {"messages": [{**user, "note": name}, answer]},
        "message type": {"messages": [{**user, "type": "audio", "content": name}, answer]},
        "part key": messages({**part, "alt": name}, {"type": "text", "text": "hi"}),
        "text part": messages(part, {"type": "text", "text": f"and {name}"}),
        "part": messages({"type": "image", "image": name}, {"type": "text", "text": "hi"}),
        "prompt": {**prompt, "image": "other.png", "context_file": name},
        "system": {**prompt, "system": f"You see {name}"},
        "audio": {"audio": name, "text": "one two"},
        "image": {"image": {"path": name, "bytes": None}, **TEXT},
        "image beside": {"image": {"path": "other.png", "bytes": None, "alt": name}, **TEXT},
        "plain text": {"text": f"see {name}"},
        "history": {**prompt, "history": [[name, "b"]], "instruction": "hi", "output": "ok", "prompt": None},
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_of_forty_ways_to_name_a_file_none_passes_in_silence(name, folder, tmp_path):
    rows = shapes(name, folder)
    assert len(rows) > 40
    for what, row in rows.items():
        found, why = outcome(row, folder, tmp_path / "a.jsonl")
        in_text = " " in name and json.dumps(row).count(name) and f'"{name}"' not in json.dumps(row)
        assert found != "placed" or name in why or in_text, (what, why)
    for what, row in shapes("gone.png", folder).items():  # what does not exist is not counted
        assert outcome(row, folder, tmp_path / "a.jsonl")[0] != "counted", what


keys = st.sampled_from([*sorted(IGNORED), "x", "id", "text", "image", "video", "audio", "images", "messages", "prompt"])
values = st.recursive(
    st.sampled_from(FILES) | st.sampled_from(["", "a", "gone.png"]) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(keys, values, max_size=5), st.sampled_from([{}, TEXT, {"prompt": "hi", "answer": "ok"}]))
def test_every_file_that_a_drawn_row_names_is_placed_or_the_row_is_not_used(folder, tmp_path_factory, drawn, base):
    row = {**drawn, **base}
    found, why = outcome(row, folder, tmp_path_factory.getbasetemp() / "drawn.jsonl")
    if found == "placed":
        named = {name for name in FILES if f'"{name}"' in json.dumps(row)}
        assert named <= set(why)


def test_a_row_that_has_its_media_may_name_them_again(folder, tmp_path):
    for row in (
        chat("<image> of cat.png", "it is cat.png", image="cat.png", file_name="cat.png", source=f"{folder}/cat.png"),
        chat("hi", "ok", image={"path": "cat.png", "bytes": "/9j/"}, file_name="sub/cat.png", uid="cat.png"),
        chat("hi", "ok", image="cat.png", url="https://x/clip.mp4", original_path="/raw/clip.mp4", site="x.com.au"),
    ):
        assert outcome(row, folder, tmp_path / "a.jsonl")[0] == "placed"


def test_members_of_a_shard_are_files_too(tmp_path, folder):
    members = [("a.jpg", b"x"), ("a.json", json.dumps({**TEXT, "note": "see b.jpg"}).encode()), ("b.jpg", b"x")]
    members += [("b.json", json.dumps({**TEXT, "note": "b.jpg"}).encode())]
    dataset = Dataset.open([MixtureEntry("x", (write_tar(tmp_path / "s.tar", members),), folder)])
    assert [dataset.unplaced(i, dataset.sample(i)) for i in (0, 1)] == [("note", "b.jpg"), None]


@pytest.mark.parametrize("embed", [False, True])
def test_no_column_of_parquet_is_left_unread(tmp_path, media_root, embed):
    path = parquet_of(
        [chat("hi", "ok", id="0", image="cat.png")], media_root, tmp_path / "a.parquet", embed=embed, row_group_size=1
    )
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(path)
    pq.write_table(table.append_column("uid", [["tone.flac"]]).append_column("file_name", [["cat.png"]]), path)
    dataset = Dataset.open([MixtureEntry("x", (path,), media_root)])
    assert dataset.unplaced(0, dataset.sample(0)) == ("uid", "tone.flac")
    pq.write_table(table.append_column("exif", [[(media_root / "cat.png").read_bytes()]]), path)
    with pytest.raises(BadSample, match="media under `exif`"):
        Dataset.open([MixtureEntry("x", (path,), media_root)]).sample(0)


def test_a_profile_refuses_such_rows_and_counts_them_by_key(write_rows: WriteRows, family, media_root):
    rows = [chat("hi", "ok", image="cat.png", **{"source": "tone.flac"} if i % 2 else {}) for i in range(4)]
    dataset, said = write_rows([*rows, chat("is clip.mp4 one?", "ok")]), []
    shapes, bad = profile_shard(dataset, family, 0, 1, said.append, key="key")
    assert (len(shapes), [b.path for b in bad]) == (2, ["tone.flac", "tone.flac", "clip.mp4"])
    assert bad[0].reason == (
        "row names tone.flac under `source`: the file exists, but is not placed; to ignore the key, add it to "
        "dataset.ignored_keys"
    )
    assert bad[2].reason.endswith("under `conversations.value`: the file exists, but is not placed; remove the name")
    assert said[-1].endswith("rows skipped for a key: source (2 rows), value (1 rows)")
    before = profile_key(dataset, family)
    (media_root / "tone.flac").unlink()
    assert len(profile_shard(dataset, family, 0, 1, key="key")[0]) == 4
    assert profile_key(dataset, family) != before
    (entry,) = dataset.entries
    ignoring = MixtureEntry(entry.name, entry.paths, entry.media_root, ignored_keys=("source",))
    shutil.copy(media_root / "cat.png", media_root / "tone.flac")
    assert len(profile_shard(DatasetRef((ignoring,), dataset.tokenizer, 2048), family, 0, 1, key="key")[0]) == 4


def test_folders_are_listed_once_and_only_those_that_are_there(folder, monkeypatch):
    listed: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or listdir(path))
    files = MediaFolder(folder)
    for name in ("cat.png", "sub/dog.jpg", "sub/cat.png", "gone/1/2.png", "../x.png", "/etc/passwd.png", "\0.png"):
        found = files.find(name)
        assert (found is not None) == (name in FILES), name
    assert files.find("/a/b/sub/dog.jpg", by_end=True) == str(folder / "sub" / "dog.jpg")
    assert files.find("//host/cat.png", by_end=True) is None
    assert listed == [str(folder), str(folder / "sub")]


def test_names_are_found_in_long_texts_in_one_pass():
    text = "x" * 10**6 + " (a.png) " + "." * 10**5 + "y" * 10**6
    assert list(names_in({"k": [text], "no": "b.png"}, ("no",))) == [("k", "a.png")]
