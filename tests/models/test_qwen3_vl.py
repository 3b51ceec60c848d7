"""Qwen3-VL's media rules against the Hugging Face processors and vision tower they promise to equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

from dflop.models import load_rules
from tests.models.placing import place_image
from tests.models.towers import attended
from tests.models.video_checks import (
    SMALL_CLIPS,
    assert_video_equals_the_processor,
    assert_videos_of_every_length_equal_the_processor,
    place_video,
)

NAME = "qwen3_vl"
RULES = load_rules(NAME, {}, {})
CAPPED = load_rules(NAME, {}, {"cap_pixels_per_frame": True, "max_video_tokens": 60})
LARGE = load_rules(NAME, {}, {"video_max_pixels": 32 * 32 * 24_576, "video_fps": 1.5})
FAIR = load_rules(NAME, {}, {"cap_pixels_per_frame": True, "video_min_pixels": 32 * 32})
SIDES = st.one_of(st.integers(1, 300), st.integers(1, 9000))


@given(SIDES, SIDES, st.integers(0, 9))
@example(1, 1, 0).via("smallest")
@example(8000, 3, 0).via("refused")
@example(8000, 40, 0).via("ratio of exactly 200")
@example(3024, 4032, 0).via("portrait photo")
@example(6000, 4000, 3).via("24 MP")
def test_images_equal_the_processor(width, height, level):
    limits = RULES.limits(level)
    try:
        size = smart_resize(height, width, 32, limits["min_pixels"], limits["max_pixels"])
    except ValueError:
        with pytest.raises(ValueError, match=f"aspect ratio of {width}x{height} exceeds 200"):
            place_image(RULES, width, height, level=level)
        return
    placed = place_image(RULES, width, height, level=level)
    assert placed.grid == (1, size[0] // 16, size[1] // 16)
    assert placed.layout == ("<|vision_start|>", placed.num_tokens // 4, "<|vision_end|>")


@pytest.mark.parametrize("size", [(1, 1), (28, 5000), (80, 112), (333, 222), (1500, 1100)])
def test_an_image_becomes_the_processors_pixels(size):
    image = Qwen2VLImageProcessorPil(patch_size=16)
    made = image(images=np.zeros((size[1], size[0], 3), np.uint8), input_data_format="channels_last")
    placed = place_image(RULES, *size)
    assert placed.grid == tuple(made["image_grid_thw"][0])
    assert placed.num_tokens == len(made["pixel_values"])


@pytest.mark.parametrize("rules", [RULES, CAPPED, LARGE], ids=["default", "capped", "large"])
def test_videos_of_every_length_equal_the_processor(rules, ask_processor):
    assert_videos_of_every_length_equal_the_processor(rules, ask_processor)


@given(
    SIDES,
    SIDES,
    st.integers(1, 2000),
    st.floats(0.05, 1000),
    st.sampled_from([RULES, CAPPED, LARGE]),
    st.integers(0, 9),
)
@example(1365, 64, 9, 4.5, RULES, 0).via("nine frames count as eight")
@example(512, 480, 5, 2.5, FAIR, 0).via("a budget that five frames do not share evenly")
def test_videos_equal_the_processor(ask_processor, width, height, num_frames, duration_s, rules, level):
    assert_video_equals_the_processor(
        rules, ask_processor, width=width, height=height, num_frames=num_frames, duration_s=duration_s, level=level
    )


@pytest.mark.parametrize("clip", SMALL_CLIPS)
@pytest.mark.parametrize("rules", [RULES, CAPPED], ids=["default", "capped"])
def test_real_frames_equal_the_processor(clip, rules, ask_processor):
    num_frames, fps, width, height = clip
    assert_video_equals_the_processor(
        rules,
        ask_processor,
        width=width,
        height=height,
        num_frames=num_frames,
        duration_s=num_frames / fps,
        pixels=True,
    )


def test_a_video_is_written_with_the_times_of_its_patches():
    placed = place_video(RULES, 64, 64, num_frames=90, duration_s=3.0)
    assert placed.grid[0] == 3
    rows = placed.num_rows // 3
    assert [part for part in placed.layout if part != rows] == [
        "<0.3 seconds>", "<|vision_start|>", "<|vision_end|>", "<1.5 seconds>", "<|vision_start|>", "<|vision_end|>",
        "<2.7 seconds>", "<|vision_start|>", "<|vision_end|>",
    ]  # fmt: skip
    assert [part for part in placed.layout if isinstance(part, int)] == [rows] * 3


def test_a_video_without_a_duration_is_taken_to_run_at_24_frames_a_second(ask_processor):
    said = ask_processor(NAME, options={}, num_frames=100, fps=None, width=64, height=64)
    assert RULES.frame_indices(100, 0.0) == tuple(said["indices"]) == RULES.frame_indices(100, 100 / 24)
    assert place_video(RULES, 64, 64, 100, 0.0) == place_video(RULES, 64, 64, 100, 100 / 24)


@pytest.mark.parametrize("size", [(32, 32), (250, 333), (500, 90)])
def test_attended_positions_are_what_the_real_tower_is_given(size):
    config = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 8,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rules = load_rules(NAME, {"vision_config": config}, {})
    model = modeling.Qwen3VLVisionModel(modeling.Qwen3VLVisionConfig(**config)).eval()
    for placed in (place_image(rules, *size), place_video(rules, *size, num_frames=7, duration_s=3.5)):
        assert attended(model, placed.grid, model.blocks) == [placed.sum_sq_tokens] * 2
        rows = model(torch.zeros(placed.num_tokens, 3 * 2 * 16 * 16), torch.tensor([placed.grid])).pooler_output
        assert placed.num_rows == len(rows)


def test_what_no_processor_takes_is_refused():
    with pytest.raises(ValueError, match="size 0x10 is empty"):
        place_video(RULES, 0, 10, 8, 4.0)
    with pytest.raises(ValueError, match="0 video frame"):
        RULES.frame_indices(0, 1.0)
    with pytest.raises(ValueError, match=r"8 frames in 0\.5 s leave 1 after sampling"):
        load_rules(NAME, {}, {"video_min_frames": 0}).frame_indices(8, 0.5)
    with pytest.raises(ValueError, match="qwen3_vl takes no audio"):
        RULES.place("audio", width_px=0, height_px=0, num_frames=0, duration_s=1.0)
