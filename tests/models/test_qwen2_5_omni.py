"""The family's rules against the Hugging Face processors, towers and parameter counts they promise to equal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import Qwen2_5OmniProcessor, WhisperFeatureExtractor, vision_utils
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from dflop.errors import ConfigError
from dflop.models import load_family
from dflop.models.build import build_model
from dflop.records import LLM
from tests.models.placing import place_image
from tests.models.video_checks import FRAMES_AND_RATES, SIZES, SMALL_CLIPS, assert_video_equals_the_processor
from tests.train.synthetic import HF_CONFIG, TOKEN_IDS

NAME = "qwen2_5_omni_thinker"
SIDES = st.one_of(st.integers(1, 300), st.integers(1, 9000))
TINY, FULL = load_family(NAME, HF_CONFIG, {}), load_family(NAME, {}, {})
SMALL = load_family(NAME, {}, {"video_min_pixels": 56 * 56, "video_max_pixels": 64 * 28 * 28, "video_max_frames": 16})


def place_video(family, width, height, num_frames, duration_s):
    return family.place("video", width_px=width, height_px=height, num_frames=num_frames, duration_s=duration_s)


def place_audio(family, duration_s):
    return family.place("audio", width_px=0, height_px=0, num_frames=0, duration_s=duration_s)


@given(SIDES, SIDES, st.sampled_from([28 * 28, 56 * 56, 256 * 28 * 28]), st.sampled_from([256, 1280, 16384]))
@example(1, 1, 56 * 56, 1280).via("smallest")
@example(41, 8000, 56 * 56, 1280).via("ribbon")
@example(8000, 40, 56 * 56, 1280).via("ratio of exactly 200")
@example(3024, 4032, 56 * 56, 1280).via("portrait photo")
@example(6000, 4000, 56 * 56, 16384).via("24 MP")
@example(70, 98, 28 * 28, 1280).via("ties round to even")
def test_image_grid_equals_the_processor(width, height, min_pixels, max_rows):
    max_pixels = max(min_pixels, max_rows * 28 * 28)
    family = load_family(NAME, {}, {"min_pixels": min_pixels, "max_pixels": max_pixels})
    try:
        expected = smart_resize(height, width, 28, min_pixels, max_pixels)
    except ValueError:
        with pytest.raises(ValueError, match=f"aspect ratio of {width}x{height}"):
            place_image(family, width, height)
        return
    placed = place_image(family, width, height)
    assert family.frame_size_px(placed.grid) == expected
    processor = Qwen2VLImageProcessorPil(min_pixels=min_pixels, max_pixels=max_pixels)
    assert placed.num_tokens == processor.get_number_of_image_patches(height, width, {})
    assert placed.num_rows == placed.num_tokens // 4
    assert family.array_shape("vision", placed.grid) == (placed.num_tokens, 3 * 2 * 14 * 14)


def test_empty_image_is_refused():
    with pytest.raises(ValueError, match="size 0x10 is empty"):
        place_image(FULL, 0, 10)


@given(st.integers(2, 10_000), st.floats(0.01, 4000), st.integers(2, 100), st.integers(2, 10))
def test_sampled_frames_are_even_ordered_and_exist(num_frames, duration_s, max_frames, min_frames):
    family = load_family(NAME, {}, {"video_max_frames": max_frames, "video_min_frames": min(min_frames, max_frames)})
    indices = family.frame_indices(num_frames, duration_s)
    assert len(indices) % 2 == 0
    assert 2 <= len(indices) <= min(max_frames, num_frames)
    assert indices[0] == 0
    assert indices[-1] < num_frames
    assert list(indices) == sorted(set(indices)), "a frame is read twice although there are enough"


def test_frames_follow_the_rate_between_the_limits():
    family = load_family(NAME, {}, {"video_fps": 2.0, "video_min_frames": 4, "video_max_frames": 16})
    counts = [len(family.frame_indices(900, duration_s)) for duration_s in (0.5, 3, 5, 30)]
    assert counts == [4, 6, 10, 16]


def test_video_without_frames_is_refused():
    with pytest.raises(ValueError, match="0 video frame"):
        FULL.frame_indices(0, 1.0)


@pytest.mark.parametrize("family", [FULL, SMALL], ids=["default", "small"])
def test_videos_equal_the_processor(family, ask_processor):
    for (num_frames, fps), (width, height) in zip(FRAMES_AND_RATES, itertools.cycle(SIZES)):
        for w, h in ((width, height), (426, 240)):
            assert_video_equals_the_processor(
                family, ask_processor, width=w, height=h, num_frames=num_frames, duration_s=num_frames / fps
            )


@pytest.mark.parametrize("clip", SMALL_CLIPS)
def test_real_frames_equal_the_processor(clip, ask_processor):
    num_frames, fps, width, height = clip
    assert_video_equals_the_processor(
        SMALL,
        ask_processor,
        width=width,
        height=height,
        num_frames=num_frames,
        duration_s=num_frames / fps,
        pixels=True,
    )


@given(st.integers(28, 2000), st.integers(28, 2000), st.integers(2, 60), st.sampled_from([TINY, FULL]))
def test_vision_sum_of_squares_is_what_the_tower_attends_over(width, height, num_frames, family):
    placed = place_video(family, width, height, num_frames, num_frames / 10)
    config, grid = family.vision, torch.tensor([placed.grid])
    full = vision_utils.get_vision_cu_seqlens(grid)
    _, windows = vision_utils.get_vision_window_index(
        grid, config["spatial_merge_size"], config["window_size"], config["patch_size"]
    )
    per_layer = [full if i in config["fullatt_block_indexes"] else windows for i in range(config["depth"])]
    assert placed.sum_sq_tokens == round(sum(map(sum_of_squares, per_layer)) / config["depth"])
    assert placed.num_tokens == int(full[-1]) == int(windows[-1])


@given(st.integers(400, 16_000 * 40), st.sampled_from([TINY, FULL]))
@example(16_000 * 2, FULL).via("exactly one chunk")
@example(16_000 * 2 + 160, FULL).via("a chunk of one frame")
def test_audio_lengths_are_what_the_tower_attends_over(num_samples, family):
    placed = place_audio(family, num_samples / 16_000)
    num_frames = torch.tensor([placed.grid[0]])
    tokens, rows = modeling.Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(None, num_frames)
    assert (placed.num_tokens, placed.num_rows) == (int(tokens), int(rows))
    features = torch.zeros(1, placed.grid[0])
    _, chunks = modeling.chunk_and_pad_features(features, num_frames, family.audio["n_window"])
    attended = modeling.get_audio_cu_seqlens(chunks)
    assert placed.sum_sq_tokens == sum_of_squares(attended)
    assert placed.num_tokens == int(attended[-1])


def sum_of_squares(cu_seqlens):
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).long().pow(2).sum())


def test_audio_outside_the_limits_is_refused():
    with pytest.raises(ValueError, match=r"400\.0 s exceeds audio_max_s = 300"):
        place_audio(FULL, 400.0)
    for too_short_s in (0.0, 0.01, 0.02):
        with pytest.raises(ValueError, match="shorter than one token"):
            place_audio(FULL, too_short_s)


@pytest.mark.parametrize("duration_s", [0.1, 0.4, 1, 2.00625, 7.3331875, 29.99, 30, 30.01, 61.7, 299.99, 300])
def test_audio_rows_equal_the_processor(duration_s, monkeypatch):
    num_mel, num_rows = processor_audio(duration_s, 300, monkeypatch)
    placed = place_audio(FULL, duration_s)
    assert (placed.grid, placed.num_rows) == ((num_mel, 0, 0), num_rows)
    assert placed.layout == ("<|audio_bos|>", num_rows, "<|audio_eos|>")


def test_audio_of_half_an_hour_equals_a_processor_that_takes_it(monkeypatch):
    family = load_family(NAME, {}, {"audio_max_s": 1800.0})
    placed = place_audio(family, 1800.0)
    assert (placed.grid[0], placed.num_rows) == processor_audio(1800, 1800, monkeypatch)


def processor_audio(duration_s, chunk_length, monkeypatch):
    """Mel frames and placeholder tokens; lengths come from padding alone, so the spectrogram is left out."""
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=chunk_length)
    monkeypatch.setattr(extractor, "_torch_extract_fbank_features", lambda wave, device: np.zeros((len(wave), 128, 1)))
    processor = object.__new__(Qwen2_5OmniProcessor)
    processor.feature_extractor, processor.audio_token = extractor, "<|AUDIO|>"
    wave = np.zeros(round(duration_s * 16_000), np.float32)
    data, (text,) = processor._process_audio([wave], sampling_rate=16_000, return_attention_mask=True)
    assert set(text.split("<|AUDIO|>")) == {""}
    return int(data["feature_attention_mask"].sum()), text.count("<|AUDIO|>")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", [{}, HF_CONFIG], ids=["full size", "tiny"])
def test_parameter_counts_equal_the_real_modules(base, tied):
    config = {**base, "tie_word_embeddings": tied}
    family = load_family(NAME, config, {})
    model = meta_model(family, config)
    parts = {
        "vision": (model.model.visual, model.model.visual.blocks),
        "audio": (model.model.audio_tower, model.model.audio_tower.layers),
        LLM: (torch.nn.ModuleList([model.model.language_model, model.lm_head]), model.model.language_model.layers),
    }
    for spec in family.specs():
        whole, layers = parts[spec.module]
        assert spec.num_layers == len(layers)
        assert spec.num_layer_params == num_params(layers[0])
        assert spec.num_layer_params * spec.num_layers + spec.num_edge_params == num_params(whole), spec.module
    assert sum(s.num_layer_params * s.num_layers + s.num_edge_params for s in family.specs()) == num_params(model)


def test_widths_and_heads_equal_the_hugging_face_defaults():
    vision, audio, llm = FULL.specs()
    model = meta_model(FULL, {})
    attention = model.model.language_model.layers[0].self_attn
    assert (llm.hidden_size, llm.num_heads) == (model.config.text_config.hidden_size, attention.num_heads)
    assert llm.num_kv_heads == attention.num_key_value_heads
    towers = model.config.vision_config, model.config.audio_config
    assert (vision.hidden_size, vision.num_heads) == (towers[0].hidden_size, towers[0].num_heads)
    assert (audio.hidden_size, audio.num_heads) == (towers[1].d_model, towers[1].encoder_attention_heads)


@pytest.mark.parametrize("module", ["vision", "audio", LLM])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_shallow_models_have_the_asked_depth_and_the_real_width(module, num_layers):
    config = FULL.shallow(module, num_layers)
    shallow = load_family(NAME, config, {})
    model = meta_model(shallow, config)
    depths = {s.module: s.num_layers for s in shallow.specs()}
    assert depths == {m: num_layers if m == module else 1 for m in FULL.modules}
    real = {
        "vision": len(model.model.visual.blocks),
        "audio": len(model.model.audio_tower.layers),
        LLM: len(model.model.language_model.layers),
    }
    assert real == depths
    by_module = {s.module: s for s in FULL.specs()}
    assert all(s.num_layer_params == by_module[s.module].num_layer_params for s in shallow.specs())
    assert all(s.num_edge_params == by_module[s.module].num_edge_params for s in shallow.specs())


def test_shallow_vision_sees_both_kinds_of_attention_where_the_model_has_both():
    assert [FULL.shallow("vision", n)["vision_config"]["fullatt_block_indexes"] for n in (1, 2)] == [[0], [1]]
    only_full = load_family(NAME, {"vision_config": {"depth": 2, "fullatt_block_indexes": [0, 1]}}, {})
    assert only_full.shallow("vision", 2)["vision_config"]["fullatt_block_indexes"] == [0, 1]


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(ConfigError) as caught:
        load_family("qwen2_5_omni", {}, {})
    assert f"did you mean `{NAME}`" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown media limit `max_pixel`") as caught:
        load_family(NAME, {}, {"max_pixel": 1})
    assert (caught.value.where, "did you mean `max_pixels`" in caught.value.hint) == ("model.media.max_pixel", True)


def test_rules_key_follows_what_decides_a_placement():
    keys = {f.rules_key for f in (FULL, TINY, load_family(NAME, {}, {"video_fps": 1.0}))}
    assert len(keys) == 3
    assert load_family(NAME, {}, {"video_fps": FULL.media["video_fps"]}).rules_key == FULL.rules_key


def num_params(module):
    return sum(p.numel() for p in module.parameters())


def meta_model(family, config):
    with torch.device("meta"):
        return build_model(family, {**config, **family.token_ids(TOKEN_IDS)}, seed=0, dtype=torch.bfloat16)
