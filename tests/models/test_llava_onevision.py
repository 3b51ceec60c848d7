"""The family's rules against the Hugging Face processor, and against the rows and lengths of its model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.models import load_family
from tests.models.placing import place_frames, place_image
from tests.models.tiled import TEXT, WIDTH, FrameStack, assert_lengths, pixel_sizes, placed_images, text_of, tokenizer

NAME = "llava_onevision"
SIDES = st.one_of(st.integers(1, 300), st.integers(1, 9000))


def grid_of(rows, columns, tile_px=384):
    return [[tile_px * r, tile_px * c] for r in range(1, rows + 1) for c in range(1, columns + 1)]


CONFIGS = {
    "released": {},
    "tiny": {"vision_config": {"image_size": 42, "patch_size": 14}, "image_grid_pinpoints": grid_of(6, 6, 42)},
    "even side": {"vision_config": {"image_size": 56, "patch_size": 14}, "image_grid_pinpoints": grid_of(3, 3, 56)},
    "never one tile": {
        "image_grid_pinpoints": [[384, 768], [768, 384], [768, 768], [1152, 384], [384, 1152]],
        "vision_aspect_ratio": "anyres_max_4",
    },
    "ribbons": {"image_grid_pinpoints": grid_of(1, 40), "vision_aspect_ratio": "anyres_max_1"},
}
RULES = {name: load_family(NAME, config, {}) for name, config in CONFIGS.items()}
FULL, TINY = RULES["released"], RULES["tiny"]


@pytest.fixture(scope="module")
def processor_of():
    from transformers.models.llava_onevision import image_processing_pil_llava_onevision as imaging
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    words = tokenizer(image_token="<image>", video_token="<video>")

    def build(rules):
        config = transformers.LlavaOnevisionConfig(**rules.hf_config)
        image_processor = imaging.LlavaOnevisionImageProcessorPil(
            size={"height": rules.tile_px, "width": rules.tile_px},
            image_grid_pinpoints=[list(p) for p in config.image_grid_pinpoints],
        )
        return LlavaOnevisionProcessor(
            image_processor, words, FrameStack(TINY.tile_px), num_image_tokens=rules.side**2,
            vision_feature_select_strategy="full", vision_aspect_ratio=config.vision_aspect_ratio,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlavaOnevisionProcessor, "check_argument_for_proper_class", lambda *_: None)
        yield build


def tiny_model(rules):
    """The real model at the rules' geometry."""
    geometry = {"image_size": rules.tile_px, "patch_size": rules.tile_px // rules.side}
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **WIDTH, **geometry}
    config = {**rules.hf_config, "vision_config": vision, "text_config": TEXT}
    return transformers.LlavaOnevisionModel(transformers.LlavaOnevisionConfig(**config))


def pack_lengths(rules, width, height, num_tiles):
    """Rows the model's own packing makes of features of the right shape."""
    model = SimpleNamespace(config=transformers.LlavaOnevisionConfig(**rules.hf_config))
    features = [torch.zeros(num_tiles, rules.side**2, 1)]
    newline, ratio = torch.zeros(1), model.config.vision_aspect_ratio
    _, lengths = transformers.LlavaOnevisionModel.pack_image_features(
        model, features, [(height, width)], newline, ratio
    )
    return int(lengths[0])


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=25)
@given(SIDES, SIDES)
@example(1, 1).via("smallest")
@example(8000, 3).via("ribbon that no resolution keeps a pixel of")
@example(3, 8000)
@example(41, 8000)
@example(3024, 4032).via("portrait photo")
@example(6000, 4000).via("24 MP")
@example(383, 383)
@example(384, 384).via("exactly one tile")
@example(385, 385)
@example(769, 384)
@example(1152, 1153)
@example(20_000, 10).via("scaled down to nothing by one tile at most")
def test_image_tiles_and_rows_equal_processor_and_model(processor_of, name, width, height):
    from transformers.models.llava_onevision import modeling_llava_onevision as modeling

    rules = RULES[name]
    pinpoints = transformers.LlavaOnevisionConfig(**rules.hf_config).image_grid_pinpoints
    num_tiles = modeling.image_size_to_num_patches([height, width], pinpoints, rules.tile_px)
    try:
        num_rows = pack_lengths(rules, width, height, num_tiles)
    except RuntimeError:
        with pytest.raises(ValueError, match=f"{width}x{height} px are too narrow"):
            place_image(rules, width, height)
        return
    placed = place_image(rules, width, height)
    assert placed.grid == (num_tiles, rules.side, rules.side)
    assert num_rows == processor_of(rules)._get_number_of_features(height, width, rules.tile_px, rules.tile_px)
    assert (placed.num_rows, placed.layout) == (num_rows, (num_rows,))


SIZES = pixel_sizes(TINY.tile_px)
IMAGES = [
    *((TINY, [size]) for size in SIZES), *((TINY, SIZES[-n:]) for n in (2, 6)), (FULL, [(500, 333)]),
    (FULL, [(1000, 2000)]), (FULL, [(640, 480), (100, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "sizes"), IMAGES)
def test_images_run_through_processor_and_model_as_placed(processor_of, rules, sizes):
    model, processor, (placed, images) = tiny_model(rules), processor_of(rules), placed_images(rules, sizes)
    inputs = processor(images=[images], text=["?".join("<image>" for _ in sizes)], return_tensors="pt")
    assert text_of(processor, inputs) == "?".join(f"{'<image>' * p.num_rows}" for p in placed)
    assert inputs["pixel_values"].shape[1] == max(p.grid[0] for p in placed)
    arguments = {key: inputs[key] for key in ("pixel_values", "image_sizes", "batch_num_images")}
    features = assert_lengths(layer_of(model), lambda: model.get_image_features(**arguments), placed)
    assert [len(f) for f in features] == [p.num_rows for p in placed]


def layer_of(model):
    return model.vision_tower.encoder.layers[0]


@pytest.mark.parametrize("num_frames", [1, 2, 8, 32, 256])
@pytest.mark.parametrize("name", ["tiny", "even side"])
def test_video_runs_through_processor_and_model_as_placed(processor_of, name, num_frames):
    rules = load_family(NAME, CONFIGS[name], {"video_frames": 256})
    placed = place_frames(rules, num_frames)
    model, pixels = tiny_model(rules), torch.zeros(1, num_frames, 3, rules.tile_px, rules.tile_px)
    features = assert_lengths(layer_of(model), lambda: model.get_video_features(pixels), [placed])
    assert features.shape[1] == placed.num_rows == sum(placed.layout)
    processor = processor_of(rules)
    frames = np.zeros((num_frames, 48, 64, 3), dtype=np.uint8)
    inputs = processor(videos=[frames], text=["<video>"], return_tensors="pt")
    assert text_of(processor, inputs) == "<video>" * placed.num_rows


@given(st.integers(1, 100_000), st.integers(1, 256))
@example(1, 32)
@example(256, 32)
def test_frames_are_all_of_a_short_video_and_evenly_spaced_of_a_long_one(num_frames, limit):
    rules = load_family(NAME, {}, {"video_frames": limit})
    indices = rules.frame_indices(num_frames, 10.0)
    if num_frames <= limit:
        assert indices == tuple(range(num_frames))
    else:
        assert indices == tuple(np.linspace(0, num_frames - 1, limit, dtype=int))
    assert len(indices) == place_frames(rules, num_frames).grid[0]


@pytest.mark.parametrize("name", ["released", "never one tile"])
@settings(max_examples=40)
@given(SIDES, SIDES, st.integers(0, 8))
def test_a_level_equals_the_model_with_fewer_resolutions(name, width, height, level):
    rules = RULES[name]
    most_tiles = rules.limits(level)["max_tiles"]
    pinpoints = transformers.LlavaOnevisionConfig(**rules.hf_config).image_grid_pinpoints
    kept = [[h, w] for h, w in pinpoints if h * w <= most_tiles * rules.tile_px**2]
    assume(kept)
    fewer = load_family(NAME, {**rules.hf_config, "image_grid_pinpoints": kept}, {})
    assert place_image(rules, width, height, level=level) == place_image(fewer, width, height)


def test_the_last_level_is_the_smallest():
    assert FULL.max_level == 5
    assert [len(FULL.frame_indices(500, 9.0, level)) for level in range(8)] == [32, 16, 8, 4, 2, 1, 1, 1]
    tiles = [place_image(FULL, 6000, 4000, level=level).grid[0] for level in range(8)]
    assert tiles == [25, 16, 7, 5, 3, 2, 2, 2]
    rules = RULES["never one tile"]
    assert [rules.limits(level)["max_tiles"] for level in range(3)] == [4, 2, 2]


def test_default_resolutions_equal_hugging_face_and_their_limit_is_the_largest():
    assert [
        list(p) for p in FULL.fixed_settings("image")["image_grid_pinpoints"]
    ] == transformers.LlavaOnevisionConfig().image_grid_pinpoints
    assert {name: rules.media["max_tiles"] for name, rules in RULES.items()} == {
        "released": 36, "tiny": 36, "even side": 9, "never one tile": 4, "ribbons": 40,
    }  # fmt: skip
    assert place_image(load_family(NAME, {}, {"max_tiles": 9}), 6000, 4000).grid[0] <= 10


@pytest.mark.parametrize(
    "vision", [None, {}, {"image_size": 384}, {"image_size": 384, "patch_size": 14}, {"patch_size": 32}]
)
def test_geometry_falls_back_as_in_hugging_face(vision):
    config = transformers.LlavaOnevisionConfig(vision_config=vision).vision_config
    pinpoints = grid_of(2, 2, config.image_size)
    rules = load_family(NAME, {"vision_config": vision, "image_grid_pinpoints": pinpoints}, {})
    assert (rules.tile_px, rules.side) == (config.image_size, config.image_size // config.patch_size)


@pytest.mark.parametrize(
    ("config", "media", "message"),
    [
        ({"image_grid_pinpoints": [[384, 400]]}, {}, r"\(384, 400\).* not whole numbers of tiles of 384 px"),
        ({"image_grid_pinpoints": []}, {}, "not whole numbers of tiles"),
        ({"vision_config": {"patch_size": 14}}, {}, "not whole numbers of tiles of 224 px"),
        ({"vision_aspect_ratio": "pad"}, {}, "vision_aspect_ratio is `pad`"),
        ({"vision_aspect_ratio": "anyres_max_0"}, {}, "vision_aspect_ratio is `anyres_max_0`"),
        ({"vision_feature_select_strategy": "default"}, {}, "features `default`: the model cannot"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, {}, "`clip_vision_model` is another tower"),
        ({}, {"max_tiles": 0}, "max_tiles = 0 is less than 1"),
        ({}, {"video_frames": 0}, "video_frames = 0 is less than 1"),
        (CONFIGS["never one tile"], {"max_tiles": 1}, "max_tiles = 1 is less than 2"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config, media, message):
    with pytest.raises(ConfigError, match=message):
        load_family(NAME, config, media)
