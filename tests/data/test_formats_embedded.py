import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.formats.embedded import NamedBytes, open_window
from dflop.data.headers import BadMedia, MediaSource, read_header

FILES = [
    ("image", "cat.png", decode_image),
    ("video", "clip.mp4", lambda source: decode_video(source, [0, 9, 3])),
    ("audio", "tone.flac", lambda source: decode_audio(source, 8000)),
]


def sources(path: Path) -> dict[str, MediaSource]:
    """The same file in every way a reader may get it."""
    content = path.read_bytes()
    around = path.with_name("around.bin")
    around.write_bytes(b"x" * 777 + content + b"y" * 999)
    return {
        "path": path,
        "bytes": io.BytesIO(content),
        "named": NamedBytes(content, path.name),
        "window": open_window(around, 777, len(content), path.name),
        "file": path.open("rb"),
    }


@pytest.mark.parametrize(("kind", "name", "decode"), FILES)
def test_headers_pixels_and_samples_are_the_same_from_a_path_or_an_open_file(media_root, kind, name, decode):
    path = media_root / name
    assert {read_header(kind, source) for source in sources(path).values()} == {read_header(kind, path)}
    expected = decode(path)
    for source in sources(path).values():
        assert np.array_equal(decode(source), expected)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("content", [b"", b"not media " * 100])
def test_open_files_that_are_no_media_say_why_and_are_closed(tmp_path, kind, content):
    (tmp_path / "x").write_bytes(b"..." + content)
    for source in (io.BytesIO(content), open_window(tmp_path / "x", 3, len(content), "x")):
        with pytest.raises(BadMedia, match="not an image|broken container" if content else "empty file"):
            read_header(kind, source)
        assert source.closed


def test_an_open_file_opens_no_other(media_root, monkeypatch):
    monkeypatch.chdir(media_root)
    with pytest.raises(BadMedia, match="broken container"):
        read_header("video", NamedBytes(b"ffconcat version 1.0\nfile clip.mp4\n", "list.ffconcat"))


@given(
    st.binary(max_size=60),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(-70, 70), st.sampled_from([0, 1, 2]), st.integers(-1, 70)), max_size=8),
)
def test_a_window_is_a_file(tmp_path_factory, content, start, moves):
    path = tmp_path_factory.getbasetemp() / "window.bin"
    path.write_bytes(b"<" * start + content + b">" * 50)
    expected = io.BytesIO(content)
    with open_window(path, start, len(content), "x") as window:
        for offset, whence, size in moves:
            if offset + (0, expected.tell(), len(content))[whence] >= 0:
                assert window.seek(offset, whence) == expected.seek(offset, whence)
            assert window.read(size) == expected.read(size)
            assert window.tell() == expected.tell()
