"""Arrays against the Hugging Face processors that made the models' training data."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from dflop.models import load_family
from dflop.models.arrays import CLIP_MEAN, CLIP_STD, SAMPLE_RATE_HZ, log_mel, patchify

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
    np.testing.assert_allclose(got, expected, atol=1e-5)


def naive_patches(clip, grid, patch, merge, frames):
    normalised = (clip.astype(np.float64) / 255 - np.array(CLIP_MEAN)) / np.array(CLIP_STD)
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
            normalised[t * frames : (t + 1) * frames, h * patch : (h + 1) * patch, w * patch : (w + 1) * patch]
            .transpose(3, 0, 1, 2)
            .ravel()
            for t, h, w in order
        ]
    )


def test_a_single_frame_is_repeated_in_time():
    frame = picture(28, 28)[None]
    once = patchify(frame, (1, 2, 2), patch_px=14, merge=2, temporal_patch=2)
    twice = patchify(np.repeat(frame, 2, axis=0), (1, 2, 2), patch_px=14, merge=2, temporal_patch=2)
    np.testing.assert_array_equal(once, twice)


def test_frames_that_do_not_match_the_grid_are_refused():
    with pytest.raises(ValueError, match=r"frames \(3, 28, 28, 3\) do not match grid \(1, 2, 2\)"):
        patchify(np.zeros((3, 28, 28, 3), np.uint8), (1, 2, 2), patch_px=14, merge=2, temporal_patch=2)


@pytest.mark.parametrize("seconds", [0.1, 0.73, 7.3, 29.99])
def test_audio_equals_the_processor_that_pads_to_300_s(seconds):
    clip = speech(round(seconds * SAMPLE_RATE_HZ))
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, sampling_rate=SAMPLE_RATE_HZ, chunk_length=300)
    padded = extractor(
        clip, sampling_rate=SAMPLE_RATE_HZ, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    num_frames = FAMILY.place("audio", width_px=0, height_px=0, num_frames=0, duration_s=seconds).grid[0]
    assert num_frames == padded["attention_mask"].sum()
    mel = log_mel(clip, num_frames=num_frames, num_mel_bins=128)
    assert mel.dtype == np.float32
    np.testing.assert_allclose(mel, padded["input_features"][0][:, :num_frames], atol=1e-5)


@pytest.mark.parametrize("num_samples", [1600, 1599, 1760, 1, 4000])
def test_audio_has_the_planned_frames_whatever_was_decoded(num_samples):
    assert log_mel(speech(num_samples), num_frames=10, num_mel_bins=80).shape == (80, 10)


def test_audio_beyond_the_planned_frames_is_not_heard():
    clip = speech(3200)
    np.testing.assert_array_equal(
        log_mel(clip, num_frames=10, num_mel_bins=80), log_mel(clip[:1600], num_frames=10, num_mel_bins=80)
    )


def test_silence_is_finite():
    assert np.isfinite(log_mel(np.zeros(1600, np.float32), num_frames=10, num_mel_bins=128)).all()
