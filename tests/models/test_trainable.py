"""What families make of decoded media equals their processors."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dflop.data.demo_content import write_video
from dflop.data.load_media import load_item, resize
from dflop.models import load_family
from dflop.models.arrays import SAMPLE_RATE_HZ, log_mel, patchify
from dflop.models.media import MediaHeader
from dflop.models.pixels import CLIP, HALF, IMAGENET
from tests.models.placing import item_of, place_frames, place_image


def items_of(family, folder, sizes):
    """Pictures of noise on disk, as a data profile of one sample sees them."""
    for number, (width, height) in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
        header = MediaHeader("image", width, height, 1, 0.0)
        yield header.item(f"{number}.png", family.place(header, len(sizes)))


def tiles_of(family, folder, sizes):
    """(images, what we make of each)."""
    items = list(items_of(family, folder, sizes))
    arrays = [load_item(folder / item.path, item, family) for item in items]
    for item, array in zip(items, arrays, strict=True):
        assert array.shape == family.array_shape("vision", item.grid)
    return [np.asarray(Image.open(folder / item.path)) for item in items], [pixels_of(family, a) for a in arrays]


def pixels_of(family, array):
    """What the stage makes of an array of bytes."""
    assert array.dtype == np.uint8
    return family.towers["vision"].colours.normalised(torch.from_numpy(array), torch.float32).numpy()


TILED_SIZES = [[(384, 384)], [(1000, 300)], [(333, 1001)], [(50, 20)], [(769, 384)]]


@pytest.mark.parametrize("sizes", [*TILED_SIZES, [(500, 333), (30, 90), (384, 384), (101, 100)]])
def test_tiles_of_llavas_images_equal_the_processor(sizes, tmp_path):
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    images, arrays = tiles_of(load_family("llava_onevision", {}, {}), tmp_path, sizes)
    processor = LlavaOnevisionImageProcessorPil(image_mean=HALF.mean, image_std=HALF.std)
    made = processor(images=[images], input_data_format="channels_last", return_tensors="np")["pixel_values"]
    for array, expected in zip(arrays, made, strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-5)


@pytest.mark.parametrize("sizes", [*TILED_SIZES, [(448, 448)], [(1200, 900)]])
def test_tiles_of_internvl_equal_the_processor(sizes, tmp_path):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    images, (array,) = tiles_of(load_family("internvl", {}, {"max_tiles": 6}), tmp_path, sizes)
    processor = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=6, image_mean=IMAGENET.mean,
        image_std=IMAGENET.std,
    )  # fmt: skip
    made = processor(images=images, input_data_format="channels_last", return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(array, made, atol=1e-5)


def test_a_sample_that_was_made_smaller_has_the_tiles_of_its_level(tmp_path):
    family = load_family("internvl", {}, {})
    Image.new("RGB", (1600, 1200)).save(tmp_path / "0.png")
    for level in range(family.max_level + 1):
        header = MediaHeader("image", 1600, 1200, 1, 0.0)
        item = header.item("0.png", family.place(header, level=level))
        assert load_item(tmp_path / "0.png", item, family, level).shape[0] == item.grid[0]


@pytest.mark.parametrize("name", ["internvl", "llava_onevision"])
def test_every_frame_of_a_video_is_a_tile(name, tmp_path):
    family = load_family(name, {}, {"video_frames": 3})
    frames = [np.full((48, 64, 3), 20 * i, np.uint8) for i in range(7)]
    write_video(frames, tmp_path / "v.mp4", Fraction(7))
    header = MediaHeader("video", 64, 48, 7, 1.0)
    item = header.item("v.mp4", family.place(header))
    array = load_item(tmp_path / "v.mp4", item, family)
    assert array.shape == (3, 3, family.tile_px, family.tile_px)
    means = array.mean(axis=(1, 2, 3))
    assert means[0] < means[1] < means[2]


@pytest.mark.parametrize("size", [(56, 84), (101, 333), (640, 480), (37, 29), (1, 1), (13, 1500)])
@pytest.mark.parametrize(
    ("name", "patch_px", "colours"),
    [("qwen2_5_omni_thinker", 14, CLIP), ("qwen2_5_vl", 14, CLIP), ("qwen3_vl", 16, HALF)],
)
def test_pixels_equal_the_processor(name, patch_px, colours, size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    width, height = size
    family, image = load_family(name, {}, {"max_pixels": 64 * 32 * 32}), picture(width, height)
    processor = Qwen2VLImageProcessorPil(
        min_pixels=family.media["min_pixels"], max_pixels=family.media["max_pixels"], patch_size=patch_px,
        image_mean=colours.mean, image_std=colours.std,
    )  # fmt: skip
    expected = processor(images=image, input_data_format="channels_last", return_tensors="np")
    placed = family.place(MediaHeader("image", width, height, 1, 0.0))
    assert placed.grid == tuple(expected["image_grid_thw"][0])
    item = item_of(placed, "image", width, height)
    array = family.array_of(item, [resize(image[None], *family.frame_sizes_px(item))])
    assert array.shape == family.array_shape("vision", placed.grid)
    np.testing.assert_allclose(pixels_of(family, array), expected["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("duration_s", [0.1, 7.3331875, 29.995, 30.0, 41.7])
def test_a_window_of_audio_equals_the_processor(duration_s):
    family = load_family("qwen2_audio", {}, {})
    num_samples = round(duration_s * SAMPLE_RATE_HZ)
    waveform = np.random.default_rng(1).normal(0, 0.1, num_samples).astype(np.float32)
    extract = transformers.WhisperFeatureExtractor(feature_size=128)
    made = extract(waveform, sampling_rate=SAMPLE_RATE_HZ, return_attention_mask=True, return_tensors="np")
    placed = family.place(MediaHeader("audio", 0, 0, 0, duration_s))
    array = family.array_of(item_of(placed, "audio"), [waveform])
    assert array.shape == family.array_shape("audio", placed.grid) == made["input_features"].shape
    np.testing.assert_allclose(array, made["input_features"], atol=1e-5)


@pytest.mark.parametrize("name", ["internvl", "llava_onevision"])
def test_what_cannot_be_placed_is_refused(name):
    rules = load_family(name, {}, {})
    for width, height in [(0, 10), (10, 0), (-1, 5)]:
        with pytest.raises(ValueError, match=f"size {width}x{height} is empty"):
            place_image(rules, width, height)
    with pytest.raises(ValueError, match="no frames"):
        place_frames(rules, 0)
    with pytest.raises(ValueError, match="does not support audio"):
        rules.place(MediaHeader("audio", 0, 0, 0, 1.0))


FAMILY = load_family("qwen2_5_omni_thinker", {}, {"max_pixels": 64 * 28 * 28})


def picture(width, height, seed=0):
    """Smooth colours with noise and hard edges, so that resampling has something to get wrong."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([128 + 100 * np.sin(x / 17 + c) * np.cos(y / 23 - c) for c in range(3)], axis=-1)
    waves[height // 3 : height // 2, width // 4 : width // 2] = (255, 0, 255)
    return np.clip(waves + rng.normal(0, 20, waves.shape), 0, 255).astype(np.uint8)


def speech(num_samples, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(num_samples) / SAMPLE_RATE_HZ
    envelope = 0.5 + 0.5 * np.sin(2 * np.pi * 3 * t)
    tones = sum(np.sin(2 * np.pi * f * t) / n for n, f in enumerate((140, 280, 910, 3300), start=1))
    return (0.2 * envelope * tones + rng.normal(0, 0.01, num_samples)).astype(np.float32)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([(2, 1, 1), (2, 2, 3), (4, 2, 2)]))
def test_patchify_puts_every_pixel_where_a_naive_loop_does(grid_t, blocks_h, blocks_w, sizes):
    patch, merge, frames = sizes
    grid = (grid_t, blocks_h * merge, blocks_w * merge)
    clip = np.random.default_rng(0).integers(
        0, 256, (grid_t * frames, grid[1] * patch, grid[2] * patch, 3), dtype=np.uint8
    )
    got = patchify(clip, grid, patch_px=patch, merge=merge, temporal_patch=frames)
    expected = naive_patches(clip, grid, patch, merge, frames)
    np.testing.assert_array_equal(got, expected)


def naive_patches(clip, grid, patch, merge, frames):
    order = [
        (t, block_h * merge + h, block_w * merge + w)
        for t in range(grid[0])
        for block_h in range(grid[1] // merge)
        for block_w in range(grid[2] // merge)
        for h in range(merge)
        for w in range(merge)
    ]
    return np.stack(
        [
            clip[t * frames : (t + 1) * frames, h * patch : (h + 1) * patch, w * patch : (w + 1) * patch]
            .transpose(3, 0, 1, 2)
            .ravel()
            for t, h, w in order
        ]
    )


def test_a_single_frame_is_repeated_in_time_and_three_do_not_match_a_grid_of_one():
    frame = picture(28, 28)[None]
    once, twice = (
        patchify(np.repeat(frame, n, axis=0), (1, 2, 2), patch_px=14, merge=2, temporal_patch=2) for n in (1, 2)
    )
    np.testing.assert_array_equal(once, twice)
    with pytest.raises(ValueError, match=r"frames \(3, 28, 28, 3\) do not match grid \(1, 2, 2\)"):
        patchify(np.zeros((3, 28, 28, 3), np.uint8), (1, 2, 2), patch_px=14, merge=2, temporal_patch=2)


@pytest.mark.parametrize("seconds", [0.73, 29.99])
def test_audio_equals_the_processor_that_pads_to_300_s(seconds):
    clip = speech(round(seconds * SAMPLE_RATE_HZ))
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, sampling_rate=SAMPLE_RATE_HZ, chunk_length=300)
    padded = extractor(
        clip, sampling_rate=SAMPLE_RATE_HZ, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    num_frames = FAMILY.place(MediaHeader("audio", 0, 0, 0, seconds)).grid[0]
    assert num_frames == padded["attention_mask"].sum()
    mel = log_mel(clip, num_frames=num_frames, num_mel_bins=128)
    assert mel.dtype == np.float32
    np.testing.assert_allclose(mel, padded["input_features"][0][:, :num_frames], atol=1e-5)


def test_audio_has_the_planned_frames_whatever_was_decoded():
    for num_samples in (1600, 1599, 1760, 1, 4000):
        assert log_mel(speech(num_samples), num_frames=10, num_mel_bins=80).shape == (80, 10)
    clip = speech(3200)
    heard, whole = (log_mel(part, num_frames=10, num_mel_bins=80) for part in (clip[:1600], clip))
    np.testing.assert_array_equal(heard, whole)
    assert np.isfinite(log_mel(np.zeros(1600, np.float32), num_frames=10, num_mel_bins=128)).all(), "silence"
