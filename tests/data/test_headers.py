import io
import os
import struct
import warnings

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from dflop.data import headers
from dflop.data.decode import decode_image, decode_video
from dflop.data.headers import BadMedia, open_container, read_header
from dflop.models.media import MediaHeader
from tests.data.media_files import write_clip, write_sound


def test_sizes_of_each_kind_and_no_other(media_root):
    assert read_header("image", media_root / "cat.png") == MediaHeader("image", 60, 30, 1, 0.0)
    assert read_header("video", media_root / "clip.mp4") == MediaHeader("video", 64, 48, 10, 1.0)
    assert read_header("audio", media_root / "tone.flac") == MediaHeader("audio", 0, 0, 0, 2.0)
    with pytest.raises(BadMedia, match="no video stream"):
        read_header("video", media_root / "tone.flac")
    with pytest.raises(BadMedia, match="no audio stream"):
        read_header("audio", media_root / "clip.mp4")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_header_and_decode_agree_under_exif(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned{suffix}"
    Image.fromarray(np.arange(40 * 20 * 3, dtype=np.uint8).reshape(20, 40, 3)).save(path, exif=exif)
    header = read_header("image", path)
    assert (header.width_px, header.height_px) == ((20, 40) if orientation >= 5 else (40, 20))
    with Image.open(path) as stored:
        assert np.array_equal(decode_image(path), np.asarray(ImageOps.exif_transpose(stored).convert("RGB")))


def test_too_many_pixels_is_refused_without_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    Image.new("1", (12_000, 8_000)).save(path)  # 96 Mpx: Pillow would warn, our default limit allows it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_header("image", path).width_px == 12_000
        monkeypatch.setattr(headers, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(BadMedia, match="12000 x 8000 px exceeds the limit of 1000 px"):
            read_header("image", path)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_unusable_files_say_why(tmp_path, kind):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not media " * 100)
    os.mkfifo(tmp_path / "fifo")
    expected = {"absent": "file not found", "empty": "empty file", ".": "not a regular file", "fifo": "not a regular"}
    for name, reason in {**expected, "text": "not an image|broken container"}.items():
        with pytest.raises(BadMedia, match=reason):
            read_header(kind, tmp_path / name)


def test_the_cover_of_a_song_is_no_video(tmp_path):
    cover = io.BytesIO()
    Image.new("RGB", (16, 16)).save(cover, "PNG")
    picture = b"\0image/png\0\3\0" + cover.getvalue()
    frame = b"APIC" + struct.pack(">I", len(picture)) + b"\0\0" + picture
    size = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))  # seven bits each
    plain, song = write_sound(tmp_path / "plain.mp3", 1.0, "libmp3lame"), tmp_path / "song.mp3"
    song.write_bytes(b"ID3\3\0\0" + size + frame + plain.read_bytes())
    with av.open(song) as container:
        assert len(container.streams.video) == 1
    assert read_header("audio", song).duration_s == pytest.approx(1.0, abs=0.1)
    with pytest.raises(BadMedia, match="no video stream"):
        read_header("video", song)


def test_playlists_are_not_followed(media_root):
    # A name FFmpeg's concat demuxer would accept: relative, in the same folder.
    (media_root / "list.ffconcat").write_text("ffconcat version 1.0\nfile clip.mp4\n")
    with pytest.raises(BadMedia, match="broken container"):
        read_header("video", media_root / "list.ffconcat")


def test_a_video_of_huge_frames_is_refused(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "v.mp4", 1)
    assert read_header("video", path).width_px == 64
    monkeypatch.setattr(headers, "MAX_FRAME_PIXELS", 64 * 48 - 1)
    with pytest.raises(BadMedia, match="video of 64 x 48 px exceeds the limit of 3071 px per frame"):
        read_header("video", path)
    with pytest.raises(BadMedia):
        decode_video(path, [0])  # the decoder itself, whatever a header said


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_f32le", "adpcm_ms", "pcm_mulaw"])
@pytest.mark.parametrize("num_list_bytes", [4, 30_000])
def test_a_short_look_at_a_wav_finds_the_same(tmp_path, codec, num_list_bytes):
    path = write_sound(tmp_path / "a.wav", 2.5, codec)
    content = path.read_bytes()
    chunk = b"LIST" + num_list_bytes.to_bytes(4, "little") + bytes(num_list_bytes)
    riff = (len(content) + len(chunk) - 8).to_bytes(4, "little")
    path.write_bytes(content[:4] + riff + content[8:12] + chunk + content[12:])
    with open_container(path) as container:
        long = container.duration, container.streams.audio[0].duration, container.streams.audio[0].rate
    with open_container(path, only_header=True) as container:
        assert (container.duration, container.streams.audio[0].duration, container.streams.audio[0].rate) == long
    assert read_header("audio", path).duration_s == pytest.approx(2.5, abs=0.1)
