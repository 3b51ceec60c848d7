import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.headers import BadMedia, read_header


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_any_mode_becomes_the_same_rgb(tmp_path, mode):
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    if mode == "I;16":
        Image.fromarray(np.full((2, 3), 0xFF00, np.uint16)).save(path)
    else:
        Image.new("RGB", (3, 2), "white").convert(mode).save(path)
    pixels = decode_image(path)
    assert (pixels.shape, pixels.dtype) == ((2, 3, 3), np.uint8)
    assert (pixels == 255).all()


def test_sixteen_bit_grey_is_scaled_not_clipped_and_transparency_laid_on_white(tmp_path):
    Image.fromarray(np.array([[0, 0x7F00, 0xFF00]], np.uint16)).save(tmp_path / "x.png")
    assert decode_image(tmp_path / "x.png")[0, :, 0].tolist() == [0, 127, 255]
    Image.new("RGBA", (1, 1), (0, 0, 0, 0)).save(tmp_path / "x.png")
    assert decode_image(tmp_path / "x.png").tolist() == [[[255, 255, 255]]]


LEVELS = st.sampled_from([0, 1, 254, 255, 256, -1, 1000, 65535, 2**31 - 1, 0.5, 1.0, 1.5, float("nan"), float("inf")])


@settings(max_examples=40, deadline=None)
@given(st.lists(LEVELS, min_size=1, max_size=4), st.booleans())
def test_32_bit_levels_are_as_pillow_shows_them_or_refused_by_header_and_decoder(levels, is_float):
    if not is_float:
        levels = [int(level) for level in levels if np.isfinite(level)] or [7]
    image = Image.fromarray(np.array([levels], np.float32 if is_float else np.int32))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.tif")
        image.save(path)
        if all(0 <= level <= 255 for level in levels) and not (is_float and 0 < max(levels) <= 1):
            assert read_header("image", path).width_px == len(levels)
            assert np.array_equal(decode_image(path), np.asarray(image.convert("RGB")))
            return
        for read in (lambda: read_header("image", path), lambda: decode_image(path)):
            with pytest.raises(BadMedia, match=r"image with levels of .*, not 0 to 255"):
                read()


def test_a_pgm_of_more_than_8_bits_is_scaled(tmp_path):
    (tmp_path / "x.pgm").write_bytes(b"P5 3 1 1023\n" + np.array([0, 512, 1023], ">u2").tobytes())
    assert decode_image(tmp_path / "x.pgm")[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp"])
def test_truncated_images_never_come_back_half_grey(tmp_path, suffix):
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(whole)
    content = whole.read_bytes()
    for size in range(1, len(content) * 9 // 10, len(content) // 20):
        cut.write_bytes(content[:size])
        with pytest.raises(BadMedia):
            decode_image(cut)


def test_video_frames_are_the_ones_asked_for(media_root):
    frames = decode_video(media_root / "clip.mp4", [0, 9, 4, 4])
    assert (frames.shape, frames.dtype) == ((4, 48, 64, 3), np.uint8)
    assert np.abs(frames.mean(axis=(1, 2, 3)) - [0, 180, 80, 80]).max() < 8
    assert np.array_equal(frames, decode_video(media_root / "clip.mp4", [0, 9, 4, 4]))


def test_frames_and_streams_that_are_not_there(media_root):
    with pytest.raises(BadMedia, match="ends after 10 frames, frame 10 was requested"):
        decode_video(media_root / "clip.mp4", [10])
    with pytest.raises(BadMedia, match="no video stream"):
        decode_video(media_root / "tone.flac", [0])
    with pytest.raises(BadMedia, match="no audio stream"):
        decode_audio(media_root / "clip.mp4", 16_000)
    with pytest.raises(ValueError, match="non-empty"):
        decode_video(media_root / "clip.mp4", [])


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050])
def test_audio_is_resampled_to_mono(media_root, rate):
    samples = decode_audio(media_root / "tone.flac", rate)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 2 * rate) <= 2
    spectrum = np.abs(np.fft.rfft(samples))
    assert np.argmax(spectrum) / 2 == pytest.approx(16_000 / (10 * np.pi), abs=2)  # sin(n / 5) at 16 kHz, in Hz
    assert 0.45 < np.abs(samples).max() < 0.55


def test_audio_that_does_not_end_is_refused(media_root):
    """A megabyte of packed silence is days of it, whatever the header says."""
    assert len(decode_audio(media_root / "tone.flac", 8_000, max_duration_s=2.1)) > 0
    with pytest.raises(BadMedia, match=r"audio is longer than 1.5 s"):
        decode_audio(media_root / "tone.flac", 8_000, max_duration_s=1.5)
