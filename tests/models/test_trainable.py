"""What trainable families make of decoded media equals their processors; the others say that they cannot."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dflop.data.load import resize
from dflop.errors import ConfigError
from dflop.models import FAMILIES, load_family, load_trainable
from dflop.models.arrays import CLIP_MEAN, CLIP_STD, SAMPLE_RATE_HZ

HALF = (0.5, 0.5, 0.5)
TRAINABLE = {"qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen3_vl"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_trained_or_says_that_it_cannot_be(name):
    assert load_family(name, {}, {}).modules[-1] == "llm"
    if name in TRAINABLE:
        assert load_trainable(name, {}, {}).name == name
        return
    with pytest.raises(ConfigError, match=f"`{name}` can be profiled and planned, but not trained") as caught:
        load_trainable(name, {}, {})
    assert all(other in caught.value.hint for other in TRAINABLE)


@pytest.mark.parametrize("size", [(224, 224), (101, 333), (640, 480), (37, 29)])
@pytest.mark.parametrize(
    ("name", "patch_px", "mean", "std"), [("qwen2_5_vl", 14, CLIP_MEAN, CLIP_STD), ("qwen3_vl", 16, HALF, HALF)]
)
def test_pixels_equal_the_processor(name, patch_px, mean, std, size):
    width, height = size
    family = load_trainable(name, {}, {"max_pixels": 64 * 32 * 32})
    image = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(
        min_pixels=family.media["min_pixels"], max_pixels=family.media["max_pixels"], patch_size=patch_px,
        image_mean=list(mean), image_std=list(std),
    )  # fmt: skip
    expected = processor(images=image, input_data_format="channels_last", return_tensors="np")
    placed = family.place("image", width_px=width, height_px=height, num_frames=1, duration_s=0.0)
    assert placed.grid == tuple(expected["image_grid_thw"][0])
    array = family.item_array("image", resize(image[None], family.frame_size_px(placed.grid)), placed.grid)
    assert array.shape == family.array_shape("vision", placed.grid)
    np.testing.assert_allclose(array, expected["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("duration_s", [0.1, 7.3331875, 29.995, 30.0, 41.7])
def test_a_window_of_audio_equals_the_processor(duration_s):
    family = load_trainable("qwen2_audio", {}, {})
    num_samples = round(duration_s * SAMPLE_RATE_HZ)
    waveform = np.random.default_rng(1).normal(0, 0.1, num_samples).astype(np.float32)
    extract = WhisperFeatureExtractor(feature_size=128)
    made = extract(waveform, sampling_rate=SAMPLE_RATE_HZ, return_attention_mask=True, return_tensors="np")
    placed = family.place("audio", width_px=0, height_px=0, num_frames=0, duration_s=duration_s)
    array = family.item_array("audio", waveform, placed.grid)
    assert array.shape == family.array_shape("audio", placed.grid) == made["input_features"].shape
    np.testing.assert_allclose(array, made["input_features"], atol=1e-5)
