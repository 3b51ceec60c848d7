"""What the profile says of a file is what decoding gives, where headers lie or guess."""

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.decode import decode_audio, decode_video
from dflop.data.headers import BadMedia, read_header
from tests.data.media_files import RATE, cut_clip, state_avi_frames, write_clip, write_sound


def check_frames(path: Path, num_frames: int | None = None) -> None:
    header = read_header("video", path)
    assert num_frames is None or header.num_frames == num_frames
    assert header.duration_s == pytest.approx(header.num_frames / RATE, abs=0.5 / RATE)
    assert len(decode_video(path, [header.num_frames - 1])) == 1
    with pytest.raises(BadMedia, match=f"ends after {header.num_frames} frames"):
        decode_video(path, [header.num_frames])


@settings(max_examples=20, deadline=None)
@given(
    num_frames=st.integers(17, 40),
    gop=st.sampled_from([4, 8, 50]),
    bframes=st.integers(0, 3),
    skip=st.integers(0, 9),
    num_hidden=st.integers(0, 15),
    suffix=st.sampled_from([".mp4", ".mov", ".mkv"]),
)
def test_a_clip_cut_without_encoding_has_the_frames_that_are_shown(
    num_frames, gop, bframes, skip, num_hidden, suffix
):  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        whole = write_clip(Path(folder, "whole.mp4"), num_frames, gop=gop, bframes=bframes)
        hide_s = num_hidden / RATE if suffix != ".mkv" else 0.0
        cut = cut_clip(whole, Path(folder, f"cut{suffix}"), skip=skip, hide_s=hide_s)
        try:
            header = read_header("video", cut)
        except BadMedia:
            with pytest.raises(BadMedia):
                decode_video(cut, [0])
            return
        assert len(decode_video(cut, [header.num_frames - 1])) == 1
        with pytest.raises(BadMedia, match=f"ends after {header.num_frames} frames"):
            decode_video(cut, [header.num_frames])


def test_an_edit_list_hides_frames(tmp_path):
    whole = write_clip(tmp_path / "whole.mp4", 30, gop=50)
    check_frames(whole, 30)
    check_frames(cut_clip(whole, tmp_path / "trimmed.mp4", hide_s=0.5), 15)


@pytest.mark.parametrize("flags", ["frag_keyframe", "frag_keyframe+empty_moov"])
def test_fragments_are_counted(tmp_path, flags):
    check_frames(write_clip(tmp_path / "fragments.mp4", 30, movflags=flags), 30)


@pytest.mark.parametrize("stated", [0, 7, 500])
def test_an_avi_has_the_frames_it_holds_whatever_it_states(tmp_path, stated):
    path = write_clip(tmp_path / "x.avi", 24, codec="mpeg4", bframes=0)
    state_avi_frames(path, stated)
    check_frames(path, 24)


@pytest.mark.parametrize("suffix", [".ts", ".mpg"])
def test_joined_streams_last_as_long_as_both(tmp_path, suffix):
    codec = "libx264" if suffix == ".ts" else "mpeg1video"
    path = write_clip(tmp_path / f"x{suffix}", 20, codec=codec, bframes=0)
    path.write_bytes(path.read_bytes() * 2)
    check_frames(path, 40)


def test_a_matroska_lasts_as_long_as_its_video_and_its_sound_as_long_as_itself(tmp_path):
    path = write_clip(tmp_path / "x.mkv", 30, sound_s=2.0)
    check_frames(path, 30)
    check_length(path, 2.0, slack_s=0.05)
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])  # a download that ended early
    assert read_header("video", path).num_frames < 30
    check_frames(path)
    assert read_header("audio", path).duration_s < 1.9


def test_sound_without_durations_lasts_to_its_last_packet(tmp_path):
    path = write_clip(tmp_path / "x.mkv", 600, sound_s=20.0)  # 20 s of video lie before the sound
    assert read_header("audio", path).duration_s == pytest.approx(len(decode_audio(path, 16_000)) / 16_000, abs=0.03)


def check_length(path: Path, about_s: float, slack_s: float = 0.001) -> None:
    header, decoded_s = read_header("audio", path), len(decode_audio(path, 16_000)) / 16_000
    assert header.duration_s == pytest.approx(decoded_s, abs=slack_s)
    assert decoded_s == pytest.approx(about_s, abs=0.5)


NO_XING = {"write_xing": "0"}


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.aac", "aac", {}), ("a.mp3", "libmp3lame", {}), ("a.mp3", "libmp3lame", NO_XING), ("a.flac", "flac", {}),
        ("a.wav", "pcm_s16le", {}), ("a.mka", "libopus", {}), ("a.mka", "aac", {}), ("a.ts", "aac", {}),
    ],
)  # fmt: skip
def test_a_sound_lasts_as_long_as_decoding_says(tmp_path, name, codec, options):
    quality = 500 if codec == "libmp3lame" else 0
    path = write_sound(tmp_path / name, 5.0, codec, quiet_s=4.0, quality=quality, **options)
    # The first frame of AAC in Matroska is priming, which its durations in milliseconds round.
    check_length(path, 5.0, slack_s=0.07 if (name, codec) == ("a.mka", "aac") else 0.001)


def test_a_flac_or_wav_that_was_piped_states_no_length(tmp_path):
    flac = bytearray(write_sound(tmp_path / "a.flac", 2.0, "flac").read_bytes())
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)
    (tmp_path / "piped.flac").write_bytes(flac)
    check_length(tmp_path / "piped.flac", 2.0)
    wav = bytearray(write_sound(tmp_path / "a.wav", 2.0, "pcm_s16le").read_bytes())
    at = wav.index(b"data") + 4
    wav[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    (tmp_path / "piped.wav").write_bytes(wav)
    check_length(tmp_path / "piped.wav", 2.0)


def id3(content: bytes) -> bytes:
    return b"ID3\4\0\0" + bytes(len(content) >> shift & 127 for shift in (21, 14, 7, 0)) + content


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.5, 1.0]), st.integers(0, 3000), st.booleans()), max_size=3))
def test_joined_mp3_files_last_as_long_as_all_of_them(pieces):
    with tempfile.TemporaryDirectory() as folder:
        one = write_sound(Path(folder, "one.mp3"), 1.0, "libmp3lame", quiet_s=0.5, quality=500)
        content = one.read_bytes()
        for with_xing, duration_s, num_tag_bytes, with_old_tag in pieces:
            piece = write_sound(
                Path(folder, "piece.mp3"), duration_s, "libmp3lame", quality=300,
                id3v2_version="0", write_xing=str(int(with_xing)),
            )  # fmt: skip
            content += b"TAG" + bytes(125) if with_old_tag else bytes(10)
            content += (id3(bytes(range(100)) * (num_tag_bytes // 100)) if num_tag_bytes else b"") + piece.read_bytes()
        joined = Path(folder, "joined.mp3")
        joined.write_bytes(content)
        check_length(joined, 1.0 + sum(duration_s for _, duration_s, *_ in pieces), slack_s=0.001)


def test_a_tag_that_looks_like_sound_is_refused_before_training_and_in_it(tmp_path):
    content = write_sound(tmp_path / "x.mp3", 1.0, "libmp3lame", write_xing="0").read_bytes()
    cover = (b"\xff\xfb\x90\x64" + bytes(range(200))) * 4
    (tmp_path / "joined.mp3").write_bytes(content + id3(cover) + content)
    for read in (lambda path: read_header("audio", path), lambda path: decode_audio(path, 16_000)):
        with pytest.raises(BadMedia, match="neither audio nor a tag"):
            read(tmp_path / "joined.mp3")


def test_where_a_header_is_right_nothing_is_counted(tmp_path, monkeypatch):
    video = write_clip(tmp_path / "x.mp4", 20)
    sounds = [
        write_sound(tmp_path / name, 1.0, codec)
        for name, codec in (("a.mp3", "libmp3lame"), ("a.flac", "flac"), ("a.wav", "pcm_s16le"), ("a.m4a", "aac"))
    ]
    monkeypatch.setattr("dflop.data.packets._covered_s", None)
    monkeypatch.setattr("dflop.data.packets.audio_packets", None)
    assert read_header("video", video).num_frames == 20
    assert all(read_header("audio", sound).duration_s > 0.9 for sound in sounds)
