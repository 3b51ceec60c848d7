"""What `dflop init` finds at a path, or says is wrong with it in one line; videos that lie as frames are counted."""

import gzip
import json
import os
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dflop.errors import ConfigError
from dflop.models.processor_settings import read_object
from dflop.starter.dataset import find_dataset
from tests.data.containers import jsonl_of
from tests.data.helpers import chat

ROW = json.dumps(chat("hi", "ok"))
SUFFIXES = ("json", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar", "yaml")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"", "a.json: "), ("a.json", b'{"conversations": [', "a.json: "), ("a.jsonl", b"{", "not JSON"),
        ("a.jsonl", b"\0" * 99, "row 0"), ("a.jsonl", ROW.encode("utf-16"), "row 0"), ("a.json", b"3", "a.json: "),
        ("a.jsonl", b"[" * 9999, "row 0"), ("a.jsonl.gz", gzip.compress(ROW.encode(), mtime=0)[:20], "a.jsonl.gz: "),
        ("a.parquet", b"PAR1xxxxPAR1", "Parquet file cannot be read"), ("a.tar", b"x" * 999, "shard cannot be read"),
        ("a.txt", b"hi", "unknown suffix"), ("a.jsonl", b"1\n2\n", "row 0"),
        ("a.jsonl", b'{"x": 1}', "row 0: no `conv"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_training_data_says_why(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="no training data at") as caught:
        find_dataset(tmp_path / name)
    assert reason in caught.value.what
    assert "\n" not in caught.value.what


def test_a_file_that_is_no_mixture_names_its_key(tmp_path):
    (tmp_path / "a.yaml").write_text("datasets: 3")
    with pytest.raises(ConfigError, match=r"a\.yaml:1: datasets"):
        find_dataset(tmp_path / "a.yaml")


def test_folders_and_paths_that_hold_no_file(tmp_path, monkeypatch):
    os.symlink("self.jsonl", tmp_path / "self.jsonl")
    os.symlink(tmp_path, tmp_path / "again")
    (tmp_path / "rows.jsonl").mkdir()
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(ConfigError, match="no training data at"):
        find_dataset(tmp_path)
    for path, reason in (
        (tmp_path / "none", "does not exist"), (tmp_path / "fifo.jsonl", "neither a file nor a folder"),
        (Path("x" * 5000), "cannot be read: File name too long"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            find_dataset(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_object(tmp_path / "fifo.jsonl", "a model's config")

    def denied(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        find_dataset(tmp_path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SUFFIXES), st.binary(max_size=60) | st.text(string.printable, max_size=60).map(str.encode))
def test_any_file_is_data_or_an_error_that_says_so(tmp_path, suffix, content):
    (tmp_path / f"a.{suffix}").write_bytes(content)
    try:
        found = find_dataset(tmp_path)
    except ConfigError:
        return
    finally:
        (tmp_path / f"a.{suffix}").unlink()
    assert found.num_good > 0 or found.refused_keys


def test_videos_that_lie_as_frames_are_counted_and_their_root_found(tmp_path):
    for number in range(3):
        (tmp_path / "frames" / "clip").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "frames" / "clip" / f"{number}.png")
    paths = [f"clip/{number}.png" for number in range(3)]
    rows = [chat("a", "b", videos=[paths], fps=1), chat("a", "b", video=paths), chat("a", "b", video="clip", fps=1),
            chat("a", "b", video="clip")]  # fmt: skip
    jsonl_of(rows, tmp_path / "rows.jsonl")
    found = find_dataset(tmp_path)
    assert found.frames == {"list": 1, "folder": 1, "without a rate": 2}
    assert (found.media_root, found.num_media, found.num_media_found) == (tmp_path / "frames", 4, 4)
    assert found.refused_keys == {}
