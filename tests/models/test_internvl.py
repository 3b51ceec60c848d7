"""The family's rules against the Hugging Face processors, and against the rows and lengths of its model."""

from __future__ import annotations

import importlib
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.models import load_family
from tests.models.placing import place_frames, place_image
from tests.models.tiled import TEXT, WIDTH, FrameStack, assert_lengths, pixel_sizes, placed_images, text_of, tokenizer

NAME = "internvl"
SIDES = st.one_of(st.integers(1, 300), st.integers(1, 9000))
TINY_CONFIG = {"vision_config": {"image_size": 56, "patch_size": [14, 14]}}
FULL, TINY = load_family(NAME, {}, {}), load_family(NAME, TINY_CONFIG, {})


def written(layout):
    """The layout as the processor's text has it."""
    return "".join("<IMG_CONTEXT>" * part if isinstance(part, int) else part for part in layout)


@pytest.fixture(scope="module")
def processor_of():
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as imaging
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    words = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )

    def build(rules):
        images = imaging.GotOcr2ImageProcessorPil(
            size={"height": rules.tile_px, "width": rules.tile_px}, min_patches=rules.media["min_tiles"],
            max_patches=rules.media["max_tiles"],
        )  # fmt: skip
        return InternVLProcessor(images, words, FrameStack(TINY.tile_px), image_seq_length=rules.rows_per_tile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InternVLProcessor, "check_argument_for_proper_class", lambda *_: None)
        yield build


@pytest.fixture(scope="module")
def sample_frames():
    """The video processor's sampler; its file imports torchvision, which the sampler does not use."""
    with pytest.MonkeyPatch.context() as patch:
        for depth in range(1, 5):
            name = ".".join(["torchvision", "transforms", "v2", "functional"][:depth])
            patch.setitem(sys.modules, name, types.ModuleType(name))
        # Forgotten afterwards, so that no other test meets a module without its library.
        module_name = "transformers.models.internvl.video_processing_internvl"
        patch.setitem(sys.modules, module_name, None)
        del sys.modules[module_name]
        sampler = importlib.import_module(module_name).InternVLVideoProcessor

    def sample(num_frames, num_sampled):
        processor = types.SimpleNamespace(num_frames=num_sampled, initial_shift=sampler.initial_shift)
        metadata = types.SimpleNamespace(total_num_frames=num_frames)
        return sampler.sample_frames(processor, metadata).tolist()

    return sample


def tiny_model(rules):
    """The real model at the rules' geometry."""
    vision = {**rules.hf_config.get("vision_config", {}), **WIDTH}
    config = transformers.InternVLConfig(**{**rules.hf_config, "vision_config": vision, "text_config": TEXT})
    return transformers.InternVLModel(config)


def check_rows_and_lengths(model, pixel_values, placed):
    """What the model makes of the tiles: rows, and what its layer attends over."""
    layer = model.vision_tower.encoder.layer[0]
    features = assert_lengths(layer, lambda: model.get_image_features(pixel_values), placed)
    assert features.shape[0] * features.shape[1] == sum(p.num_rows for p in placed)


@given(
    SIDES, SIDES, st.sampled_from([FULL.tile_px, TINY.tile_px]), st.integers(1, 12), st.integers(1, 24), st.booleans()
)
@example(1, 1, 448, 1, 12, False).via("smallest")
@example(8000, 3, 448, 1, 12, False).via("ribbons")
@example(3, 8000, 448, 1, 12, False)
@example(41, 8000, 448, 1, 12, False)
@example(3024, 4032, 448, 1, 12, False).via("portrait photo")
@example(6000, 4000, 448, 1, 12, False).via("24 MP")
@example(447, 447, 448, 1, 12, False)
@example(448, 448, 448, 1, 12, False).via("exactly one tile")
@example(449, 449, 448, 1, 12, False)
@example(633, 634, 448, 1, 12, False).via("just about half of 2 x 2 tiles")
@example(634, 634, 448, 1, 12, False).via("just over half of 2 x 2 tiles")
@example(896, 448, 448, 1, 12, False).via("half of 4 x 2 tiles to the pixel")
@example(897, 448, 448, 1, 12, False)
@example(600, 400, 448, 1, 3, False).via("as close to 1 x 1 as to 1 x 2")
@example(6000, 4000, 448, 1, 1, False).via("a limit of one tile")
def test_image_tiles_equal_the_processor(processor_of, width, height, tile_px, min_tiles, max_tiles, exact):
    media = {"min_tiles": max_tiles if exact else min(min_tiles, max_tiles), "max_tiles": max_tiles}
    rules = load_family(NAME, {"vision_config": {"image_size": tile_px}}, media)
    placed = place_image(rules, width, height)
    processor = processor_of(rules)
    num_tiles = processor.image_processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
    assert placed.grid == (num_tiles, tile_px // 14, tile_px // 14)
    assert placed.num_rows == num_tiles * rules.rows_per_tile
    assert written(placed.layout) == processor.replace_image_token({"num_patches": [num_tiles]}, 0)


@given(SIDES, SIDES, st.integers(0, 6))
def test_a_level_equals_the_processor_with_fewer_tiles(processor_of, width, height, level):
    limits = FULL.limits(level)
    kwargs = {"crop_to_patches": True, "max_patches": limits["max_tiles"]}
    num_tiles = processor_of(FULL).image_processor.get_number_of_image_patches(height, width, kwargs)
    assert place_image(FULL, width, height, level=level).grid[0] == num_tiles


SIZES = pixel_sizes(TINY.tile_px)
IMAGES = [
    *((TINY, [size]) for size in SIZES), *((TINY, SIZES[-n:]) for n in (2, 6)), (FULL, [(447, 449)]),
    (FULL, [(1500, 500)]),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "sizes"), IMAGES)
def test_images_run_through_processor_and_model_as_placed(processor_of, rules, sizes):
    processor, (placed, images) = processor_of(rules), placed_images(rules, sizes)
    inputs = processor(images=images, text="?".join("<IMG_CONTEXT>" for _ in sizes), return_tensors="pt")
    assert text_of(processor, inputs) == "?".join(written(p.layout) for p in placed)
    check_rows_and_lengths(tiny_model(rules), inputs["pixel_values"], placed)


@pytest.mark.parametrize("num_frames", [1, 2, 8, 32, 256])
def test_video_runs_through_processor_and_model_as_placed(processor_of, num_frames):
    rules = load_family(NAME, TINY_CONFIG, {"video_frames": 256})
    placed = place_frames(rules, num_frames)
    processor = processor_of(rules)
    frames = torch.zeros(1, num_frames, 3, rules.tile_px, rules.tile_px)
    assert written(placed.layout) == processor.replace_video_token({"pixel_values_videos": frames}, 0)
    videos = [np.zeros((num_frames, 48, 64, 3), dtype=np.uint8)]
    inputs = processor(videos=videos, text=["<video>"], return_tensors="pt")
    pad = processor.image_token_id
    assert (inputs["input_ids"] == pad).sum() == placed.num_rows == sum(p for p in placed.layout if isinstance(p, int))
    check_rows_and_lengths(tiny_model(rules), inputs["pixel_values"], [placed])


@given(st.integers(1, 100_000), st.integers(1, 300) | st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]))
@example(1, 32)
@example(256, 32)
def test_sampled_frames_differ_from_the_video_processor_by_rounding_only(sample_frames, num_frames, limit):
    rules = load_family(NAME, {}, {"video_frames": limit})
    indices, expected = rules.frame_indices(num_frames, 10.0), sample_frames(num_frames, min(limit, num_frames))
    assert len(indices) == len(expected) == place_frames(rules, num_frames).grid[0]
    # The processor counts in float32: odd multiples of a frame over twice the limit are exact below 2^24.
    is_exact = num_frames < 2**15 and limit & (limit - 1) == 0
    assert max(abs(a - b) for a, b in zip(indices, expected, strict=True)) <= (0 if is_exact else 1)
    assert len(set(indices)) == len(indices), "a frame is read twice"
    assert 0 <= indices[0] <= indices[-1] < num_frames


def test_a_limit_shrinks_to_its_least():
    assert FULL.max_level == 5
    assert [FULL.limits(level)["max_tiles"] for level in range(6)] == [12, 6, 3, 1, 1, 1]
    assert [len(FULL.frame_indices(500, 9.0, level)) for level in range(7)] == [32, 16, 8, 4, 2, 1, 1]
    at_least_four = load_family(NAME, {}, {"min_tiles": 4})
    assert [at_least_four.limits(level)["max_tiles"] for level in range(4)] == [12, 6, 4, 4]
    assert place_image(at_least_four, 500, 500, level=2).grid[0] == 4 + 1


@pytest.mark.parametrize(
    "config",
    [{}, TINY_CONFIG, {"downsample_ratio": 0.25}, {"downsample_ratio": 1.0}, {"vision_config": {"image_size": 112}}],
)
def test_geometry_and_rows_equal_the_model(config):
    rules = load_family(NAME, config, {})
    built = transformers.InternVLConfig(**config).vision_config
    assert (rules.tile_px, rules.side) == (built.image_size[0], built.image_size[0] // built.patch_size[0])
    pixels = torch.zeros(1, 3, rules.tile_px, rules.tile_px)
    check_rows_and_lengths(tiny_model(rules), pixels, [place_image(rules, 10, 10)])


@pytest.mark.parametrize(
    "config",
    [
        {"vision_config": {"image_size": 70}},
        {"downsample_ratio": 0.75},
        {"vision_feature_select_strategy": "full"},
        {"vision_config": {"image_size": 126}, "downsample_ratio": 1 / 3},
    ],
    ids=["odd side", "no whole number", "class token kept", "rounding of a third"],
)
def test_a_configuration_the_model_cannot_run_is_refused(config):
    model = tiny_model(types.SimpleNamespace(hf_config=config))
    side = model.config.vision_config.image_size[0]
    with pytest.raises((ValueError, RuntimeError)):
        model.get_image_features(torch.zeros(1, 3, side, side))
    with pytest.raises(ConfigError, match=r"downsample_ratio = |keeps the class token"):
        load_family(NAME, config, {})
