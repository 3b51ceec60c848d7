"""Qwen2.5-VL's media rules against the Hugging Face processors and vision tower they promise to equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from dflop.models import load_rules
from tests.models.placing import place_image
from tests.models.towers import attended
from tests.models.video_checks import (
    SIZES,
    SMALL_CLIPS,
    assert_video_equals_the_processor,
    assert_videos_of_every_length_equal_the_processor,
    place_video,
)

NAME = "qwen2_5_vl"
RULES = load_rules(NAME, {}, {})
CAPPED = load_rules(NAME, {}, {"cap_pixels_per_frame": True})
LEAN = load_rules(NAME, {}, {
    "video_fps": 1.5, "video_min_frames": 2, "video_max_frames": 21, "video_min_pixels": 30_000,
    "video_max_pixels": 40_000, "cap_pixels_per_frame": True, "max_video_tokens": 300,
})  # fmt: skip
SIDES = st.one_of(st.integers(1, 300), st.integers(1, 9000))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", [0, 1, 4, 12])
def test_images_of_every_shape_equal_the_processor(size, level):
    assert_image_equals_the_processor(*size, level)


@given(SIDES, SIDES, st.integers(0, 9))
def test_images_equal_the_processor(width, height, level):
    assert_image_equals_the_processor(width, height, level)


def assert_image_equals_the_processor(width, height, level):
    limits = RULES.limits(level)
    processor = Qwen2VLImageProcessorPil(min_pixels=limits["min_pixels"], max_pixels=limits["max_pixels"])
    try:
        num_patches = processor.get_number_of_image_patches(height, width, {})
    except ValueError:
        with pytest.raises(ValueError, match=f"aspect ratio of {width}x{height} exceeds 200"):
            place_image(RULES, width, height, level=level)
        return
    placed = place_image(RULES, width, height, level=level)
    size = smart_resize(height, width, 28, limits["min_pixels"], limits["max_pixels"])
    assert placed.grid == (1, size[0] // 14, size[1] // 14)
    assert placed.num_tokens == num_patches


@pytest.mark.parametrize("size", [(1, 1), (28, 5000), (70, 98), (333, 222), (1500, 1100)])
def test_an_image_becomes_the_processors_pixels_and_text(size):
    image = Qwen2VLImageProcessorPil()
    made = image(images=np.zeros((size[1], size[0], 3), np.uint8), input_data_format="channels_last")
    placed = place_image(RULES, *size)
    assert placed.grid == tuple(made["image_grid_thw"][0])
    assert placed.num_tokens == len(made["pixel_values"])
    whole = object.__new__(Qwen2_5_VLProcessor)
    whole.image_processor, whole.image_token = image, "<|image_pad|>"
    assert whole.replace_image_token(made, 0) == "<|image_pad|>" * placed.num_rows
    assert placed.layout == ("<|vision_start|>", placed.num_rows, "<|vision_end|>")


@pytest.mark.parametrize("rules", [RULES, CAPPED, LEAN], ids=["default", "capped", "lean"])
def test_videos_of_every_length_equal_the_processor(rules, ask_processor):
    assert_videos_of_every_length_equal_the_processor(rules, ask_processor)


@given(
    SIDES, SIDES, st.integers(1, 2000), st.floats(0.05, 1000), st.sampled_from([RULES, CAPPED, LEAN]), st.integers(0, 9)
)
@example(64, 64, 65, 7.0, RULES, 0).via("seven seconds are a last bit less by way of the frame rate")
def test_videos_equal_the_processor(ask_processor, width, height, num_frames, duration_s, rules, level):
    assert_video_equals_the_processor(
        rules, ask_processor, width=width, height=height, num_frames=num_frames, duration_s=duration_s, level=level
    )


@pytest.mark.parametrize("clip", SMALL_CLIPS)
def test_real_frames_equal_the_processor(clip, ask_processor):
    num_frames, fps, width, height = clip
    assert_video_equals_the_processor(
        LEAN, ask_processor, width=width, height=height, num_frames=num_frames, duration_s=num_frames / fps, pixels=True
    )


def test_the_index_past_the_end_that_the_processor_computes_is_left_out(ask_processor):
    source = {"num_frames": 17, "fps": 17 / 7, "width": 60, "height": 50}
    assert ask_processor(NAME, options={"fps": 2.0}, pixels=False, **source)["indices"][-2:] == [15, 17]
    assert "out of bounds" in ask_processor(NAME, options={"fps": 2.0}, pixels=True, **source)["error"]
    assert RULES.frame_indices(17, 7.0) == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15)


@pytest.mark.parametrize(
    "tower", [{}, {"window_size": 56, "fullatt_block_indexes": [0]}], ids=["default", "small windows"]
)
@pytest.mark.parametrize("size", [(28, 28), (112, 140), (250, 333), (500, 90)])
def test_attended_positions_are_what_the_real_tower_is_given(size, tower):
    config = {
        "depth": 4, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 8,
        "fullatt_block_indexes": [1, 3, 7], **tower,
    }  # fmt: skip
    rules = load_rules(NAME, {"vision_config": config}, {"video_min_pixels": 784})
    model = modeling.Qwen2_5_VisionTransformerPretrainedModel(modeling.Qwen2_5_VLVisionConfig(**config)).eval()
    for placed in (place_image(rules, *size), place_video(rules, *size, num_frames=6, duration_s=3.0)):
        per_layer = attended(model, placed.grid, model.blocks)
        assert placed.sum_sq_tokens == round(sum(per_layer) / len(per_layer))
        rows = model(torch.zeros(placed.num_tokens, 3 * 2 * 14 * 14), torch.tensor([placed.grid])).pooler_output
        assert placed.num_rows == len(rows)


def test_what_no_processor_takes_is_refused():
    with pytest.raises(ValueError, match="size 0x10 is empty"):
        place_image(RULES, 0, 10)
    with pytest.raises(ValueError, match="size 10x0 is empty"):
        place_video(RULES, 10, 0, 8, 4.0)
    for duration_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"video of 8 frames lasts .* s; no frame rate"):
            RULES.frame_indices(8, duration_s)
    with pytest.raises(ValueError, match=r"8 frames in 0\.5 s leave 0 after sampling"):
        load_rules(NAME, {}, {"video_min_frames": 0}).frame_indices(8, 0.5)
    with pytest.raises(ValueError, match="qwen2_5_vl takes no audio"):
        RULES.place("audio", width_px=0, height_px=0, num_frames=0, duration_s=1.0)
