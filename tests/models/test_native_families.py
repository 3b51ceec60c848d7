"""Media rules of families at native resolution against the Hugging Face processors and towers that they equal."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop.models import load_family
from dflop.models.media import MediaHeader
from tests.models.placing import item_of, place_image
from tests.models.video_checks import (
    SMALL_CLIPS,
    assert_video_equals_the_processor,
    assert_videos_of_every_length_equal_the_processor,
    place_video,
)

RULES = {
    name: load_family(family, {}, media)
    for name, (family, media) in {
        "Omni": ("qwen2_5_omni_thinker", {}),
        "Omni, wide": ("qwen2_5_omni_thinker", {"min_pixels": 256 * 28 * 28, "max_pixels": 16_384 * 28 * 28}),
        "Omni, small": (
            "qwen2_5_omni_thinker",
            {"video_min_pixels": 56 * 56, "video_max_pixels": 64 * 28 * 28, "video_max_frames": 16},
        ),
        "2": ("qwen2_vl", {}),
        "2.5": ("qwen2_5_vl", {}),
        "2.5, capped": ("qwen2_5_vl", {"cap_pixels_per_frame": True}),
        "2.5, lean": (
            "qwen2_5_vl",
            {
                "video_fps": 1.5, "video_min_frames": 2, "video_max_frames": 21, "video_min_pixels": 30_000,
                "video_max_pixels": 40_000, "cap_pixels_per_frame": True, "max_video_tokens": 300,
            },
        ),
        "3": ("qwen3_vl", {}),
        "3, capped": ("qwen3_vl", {"cap_pixels_per_frame": True, "max_video_tokens": 60}),
        "3, large": ("qwen3_vl", {"video_max_pixels": 32 * 32 * 24_576, "video_fps": 1.5}),
        "3, fair": ("qwen3_vl", {"cap_pixels_per_frame": True, "video_min_pixels": 32 * 32}),
    }.items()
}  # fmt: skip
SIDES = st.one_of(st.integers(1, 300), st.integers(1, 9000))


@pytest.mark.parametrize("name", ["Omni", "Omni, wide", "2.5", "3"])
@given(SIDES, SIDES, st.integers(0, 9))
@example(1, 1, 0).via("smallest")
@example(8000, 3, 0).via("refused")
@example(41, 8000, 0).via("ribbon")
@example(8000, 40, 0).via("ratio of exactly 200")
@example(3024, 4032, 0).via("portrait photo")
@example(6000, 4000, 3).via("24 MP")
@example(70, 98, 0).via("ties round to even")
@settings(max_examples=50)
def test_images_equal_the_processor(name, width, height, level):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    rules, patch_px = RULES[name], 16 if name == "3" else 14
    limits = rules.limits(level)
    least, most = limits["min_pixels"], limits["max_pixels"]
    try:
        size = smart_resize(height, width, 2 * patch_px, least, most)
    except ValueError:
        with pytest.raises(ValueError, match=f"aspect ratio of {width}x{height} exceeds 200"):
            place_image(rules, width, height, level=level)
        return
    placed = place_image(rules, width, height, level=level)
    assert placed.grid == (1, size[0] // patch_px, size[1] // patch_px)
    assert rules.frame_sizes_px(item_of(placed, "image", width, height)) == (size,)
    processor = Qwen2VLImageProcessorPil(patch_size=patch_px, min_pixels=least, max_pixels=most)
    assert placed.num_tokens == processor.get_number_of_image_patches(height, width, {})
    assert placed.num_rows == placed.num_tokens // 4
    tokens = rules.media_tokens["image"]
    assert placed.layout == (tokens.begin, placed.num_rows, tokens.end)
    assert rules.array_shape("vision", placed.grid) == (placed.num_tokens, 3 * 2 * patch_px**2)


@pytest.mark.parametrize(
    "name", ["Omni", "Omni, small", "2", "2.5", "2.5, capped", "2.5, lean", "3", "3, capped", "3, large"]
)
def test_videos_of_every_length_equal_the_processor(name, ask_processor):
    assert_videos_of_every_length_equal_the_processor(RULES[name], ask_processor)


@given(
    SIDES, SIDES, st.integers(1, 2000), st.floats(0.05, 1000),
    st.sampled_from(["2.5", "2.5, capped", "2.5, lean", "3", "3, capped", "3, large"]), st.integers(0, 9),
)  # fmt: skip
@example(64, 64, 65, 7.0, "2.5", 0).via("seven seconds are a last bit less by way of the frame rate")
@example(1365, 64, 9, 4.5, "3", 0).via("nine frames count as eight")
@example(512, 480, 5, 2.5, "3, fair", 0).via("a budget that five frames do not share evenly")
def test_videos_equal_the_processor(ask_processor, width, height, num_frames, duration_s, name, level):
    assert_video_equals_the_processor(
        RULES[name], ask_processor, width=width, height=height, num_frames=num_frames, duration_s=duration_s,
        level=level,
    )  # fmt: skip


@pytest.mark.parametrize("clip", SMALL_CLIPS)
@pytest.mark.parametrize("name", ["Omni, small", "2.5, lean", "3", "3, capped"])
def test_real_frames_equal_the_processor(clip, name, ask_processor):
    num_frames, fps, width, height = clip
    assert_video_equals_the_processor(
        RULES[name], ask_processor, width=width, height=height, num_frames=num_frames, duration_s=num_frames / fps,
        pixels=True,
    )  # fmt: skip


def test_the_index_past_the_end_that_the_processor_computes_is_left_out(ask_processor):
    source = {"num_frames": 17, "fps": 17 / 7, "width": 60, "height": 50}
    assert ask_processor("qwen2_5_vl", options={"fps": 2.0}, pixels=False, **source)["indices"][-2:] == [15, 17]
    assert "out of bounds" in ask_processor("qwen2_5_vl", options={"fps": 2.0}, pixels=True, **source)["error"]
    assert RULES["2.5"].frame_indices(17, 7.0) == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15)


def test_a_video_without_a_duration_is_taken_to_run_at_24_frames_a_second_by_qwen3(ask_processor):
    rules = RULES["3"]
    said = ask_processor("qwen3_vl", options={}, num_frames=100, fps=None, width=64, height=64)
    assert rules.frame_indices(100, 0.0) == tuple(said["indices"]) == rules.frame_indices(100, 100 / 24)
    assert place_video(rules, 64, 64, 100, 0.0) == place_video(rules, 64, 64, 100, 100 / 24)


TOWER = {"hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 8}
WINDOWED = TOWER | {"depth": 4, "fullatt_block_indexes": [1, 3, 7]}
DEEP = TOWER | {"depth": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}


TOWERS = {
    "qwen2_5_omni_thinker": ("qwen2_5_omni", "Qwen2_5OmniVisionEncoder", "Qwen2_5OmniVisionEncoderConfig"),
    "qwen2_vl": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig"),
}


def tower_of(family: str, config: dict[str, object]) -> torch.nn.Module:
    name, tower, config_class = TOWERS[family]
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(modeling, tower)(getattr(modeling, config_class)(**config)).eval()


def attended(tower: torch.nn.Module, grid: tuple[int, int, int], values: tuple[int, ...]) -> tuple[list[int], int]:
    """Sum of squared attention lengths in each block for one item, and the rows it becomes."""
    found: list[int] = []

    def note(_block: torch.nn.Module, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        found.append(int(kwargs["cu_seqlens"].long().diff().pow(2).sum()))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in tower.blocks]
    with torch.no_grad():
        rows = tower(torch.zeros(values), torch.tensor([grid])).pooler_output
    for hook in hooks:
        hook.remove()
    return found, len(rows)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2_5_vl", WINDOWED), ("qwen2_5_vl", WINDOWED | {"window_size": 56, "fullatt_block_indexes": [0]}),
        ("qwen2_5_omni_thinker", WINDOWED), ("qwen3_vl", DEEP),
        ("qwen2_vl", {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 8}),
    ],
    ids=["windows", "small windows", "Omni", "no windows", "Qwen2-VL"],
)  # fmt: skip
@pytest.mark.parametrize("size", [(28, 28), (112, 140), (250, 333), (500, 90)])
def test_attended_positions_are_what_the_real_tower_is_given(size, family, config):
    rules, model = load_family(family, {"vision_config": config}, {"video_min_pixels": 784}), tower_of(family, config)
    for placed in (place_image(rules, *size), place_video(rules, *size, num_frames=7, duration_s=3.5)):
        per_layer, num_rows = attended(model, placed.grid, rules.array_shape("vision", placed.grid))
        assert placed.sum_sq_tokens == round(sum(per_layer) / len(per_layer))
        assert placed.num_rows == num_rows


@pytest.mark.parametrize("name", ["Omni", "2.5", "3"])
def test_what_no_processor_takes_is_refused(name):
    rules = RULES[name]
    with pytest.raises(ValueError, match="size 0x10 is empty"):
        place_image(rules, 0, 10)
    with pytest.raises(ValueError, match="size 10x0 is empty"):
        place_video(rules, 10, 0, 8, 4.0)
    with pytest.raises(ValueError, match="0 video frame"):
        rules.frame_indices(0, 1.0)
    if name == "Omni":
        return
    with pytest.raises(ValueError, match=f"{rules.name} does not support audio"):
        rules.place(MediaHeader("audio", 0, 0, 0, 1.0))
    for duration_s in (0.0, -1.0, float("nan"), float("inf")) if name == "2.5" else ():
        with pytest.raises(ValueError, match=r"video of 8 frames lasts .* s; no frame rate"):
            rules.frame_indices(8, duration_s)
    left = {"2.5": 0, "3": 1}[name]
    with pytest.raises(ValueError, match=rf"8 frames in 0\.5 s leave {left} after sampling"):
        load_family(rules.name, {}, {"video_min_frames": 0}).frame_indices(8, 0.5)
