import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.annotations import BadSample
from dflop.data.formats import compressed, json_rows
from dflop.data.formats.annotation_file import SUFFIXES, AnnotationFile
from dflop.errors import DataError
from tests.data.helpers import chat

ROWS = [chat("a", "b", id="x"), chat("c", "d", id="é"), chat("e", "f", id=3)]


def pack(content: bytes, name: str) -> bytes:
    if name.endswith(".zst"):
        half = len(content) // 2  # two frames, as parallel compressors write them
        packer = zstandard.ZstdCompressor(write_checksum=True)  # as the zstd program does
        return b"".join(packer.compress(part) for part in (content[:half], content[half:]))
    return gzip.compress(content, compresslevel=1) if name.endswith(".gz") else content


def write(folder: Path, name: str, rows: list[object]) -> Path:
    has_lines = ".jsonl" in name.lower() or ".ndjson" in name
    text = "\n".join(json.dumps(r) for r in rows) if has_lines else json.dumps(rows, indent=1)
    (folder / name).write_bytes(pack(text.encode(), name))
    return folder / name


@pytest.mark.parametrize("name", [*(f"a{s}" for s in SUFFIXES), "v1.2.jsonl", "A.JSONL"])
def test_every_format_gives_the_same_rows(tmp_path, name):
    file = AnnotationFile(write(tmp_path, name, ROWS))
    assert [file.row(i) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert [file.sample(i).sample_id for i in range(len(file))] == ["x", "é", "3"]


@given(st.lists(st.sampled_from(["", "  ", '{"id": 1}', '{"é": "\\n"}', "{", "[1]"])), st.booleans())
def test_line_index_agrees_with_splitting(tmp_path_factory, lines, end):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(("\n".join(lines) + "\n" * end).encode())
    file = AnnotationFile(path)
    expected = [line for line in lines if line.strip()]
    assert len(file) == len(expected)
    for index, line in enumerate(expected):
        if line in ("{", "[1]"):
            with pytest.raises(BadSample, match="not"):
                file.row(index)
        else:
            assert file.row(index) == json.loads(line)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=30) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)


@settings(max_examples=40)
@given(st.lists(values), st.sampled_from([None, 1]), st.booleans(), st.sampled_from([1, 7, 2**22]))
def test_list_index_agrees_with_parsing(elements, indent, ascii, window):
    data = json.dumps(elements, indent=indent, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_WINDOW_BYTES", window)
        spans = json_rows.element_spans(b"\xef\xbb\xbf" + data + b"\n", Path("x"))
    assert [json.loads((b"\xef\xbb\xbf" + data)[a:b]) for a, b in spans] == elements


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "an object without a list of rows"), ('{"a": ["x"]}', "an object without a list of rows"),
        ("", "expected a list of rows, not 'an empty file'"), ('{"a": [{}] 2}', "not a JSON document"),
        ('{"a": [{}]', "not a JSON document"), ("{\n}{}", "not a JSON document"),
        ('{"train": [{}], "test": [{}, {}]}', "holds several lists: train, test"),
        ('[{"a": 1}, {"b"', "byte 10"), ('[{"a": 1},]', "not a JSON document"),
        ('[{"a": 1}', "file ends within the list"), ('[{"a": 1} {}]', "expected a comma, not '{'"),
        ("[1] 2", "more data after the list"),
        ("[" * 100_000, "recursion"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("window", [3, 2**22])
def test_broken_lists_say_where(tmp_path, monkeypatch, text, reason, window):
    monkeypatch.setattr(json_rows, "_WINDOW_BYTES", window)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        AnnotationFile(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"id": "a", "messages": []}\n\n{"id": "b"}', "ab"),  # as datasets' to_json writes, under the name it is given
        ('\n{"id": "a", "messages": [{"role": "user"}]}', "a"),
        ('{"id": "a", "text": ""}\n{"id": ', "a!"),
        ("\ufeff \n" + json.dumps({"id": "a", "x": "y" * 5_000_000}) + '\n{"id": "b"}', "ab"),
        ('{"version": 1, "data": [{"id": "a"}, {"id": "b"}], "names": ["x"]}', "ab"),
        ('{\n "data": [{"id": "a"}],\n "info": {"of": [{}]}, "n": 1e3\n}\n', "a"),
    ],
)
def test_a_json_file_may_hold_lines_or_an_object_with_one_list(tmp_path, text, ids):
    (tmp_path / "a.json").write_text(text)
    file = AnnotationFile(tmp_path / "a.json")

    def id_of(row: int) -> str:
        try:
            return str(file.row(row)["id"])
        except BadSample:
            return "!"

    assert "".join(map(id_of, range(len(file)))) == ids


def test_a_row_may_be_the_list_of_its_turns(tmp_path):
    rows = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            [{"user": "a", "assistant": "b"}], chat("a", "b")]  # fmt: skip
    for name in ("a.jsonl", "a.json"):
        file = AnnotationFile(write(tmp_path, name, rows))
        assert {file.sample(i).turns for i in range(4)} == {file.sample(3).turns}
    for name, bad in (("b.jsonl", [1]), ("c.jsonl", []), ("d.jsonl", [{"x": 1}])):
        with pytest.raises(BadSample, match="not a JSON object but a list"):
            AnnotationFile(write(tmp_path, name, [bad])).row(0)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="absent"):
        AnnotationFile(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_files_cut_off_or_damaged_are_refused_and_never_shorter(tmp_path, suffix):
    whole = write(tmp_path, f"a.jsonl{suffix}", list(range(5000))).read_bytes()
    for size in range(1, len(whole), len(whole) // 20):
        (tmp_path / f"cut.jsonl{suffix}").write_bytes(whole[:size])
        try:
            rows = AnnotationFile(tmp_path / f"cut.jsonl{suffix}")
        except DataError:
            continue
        raise AssertionError(f"{len(rows)} rows of {size} bytes")
    (tmp_path / f"bad.jsonl{suffix}").write_bytes(whole[:40] + b"\xff" * 40 + whole[80:])
    with pytest.raises(DataError, match="cannot be read"):
        AnnotationFile(tmp_path / f"bad.jsonl{suffix}")


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".jsonl.zst"])
def test_opening_holds_an_index_and_no_rows(tmp_path, suffix):
    rng = np.random.default_rng(0)
    path = write(tmp_path, f"a{suffix}", [chat(rng.bytes(3000).hex(), "ok") for _ in range(4000)])  # 24 MB
    tracemalloc.start()
    file = AnnotationFile(path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(file) == 4000
    assert held < 200_000
    assert peak < 20_000_000


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_bomb_is_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(compressed, "FREE_BYTES", 100_000)
    ordinary = write(tmp_path, f"rows.jsonl{suffix}", [chat("a", "b" * 2000, id=n) for n in range(40)])
    assert AnnotationFile(ordinary).row(39)["id"] == 39, "small files unpack to anything"
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(pack(b" " * 10_000_000, path.name))
    with pytest.raises(DataError, match="decompresses to more than 200 times its size"):
        AnnotationFile(path)
