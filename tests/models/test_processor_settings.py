"""Limits that a model's folder states, held equal to the processors that transformers makes of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen2VLImageProcessorPil

from dflop import resources
from dflop.config import load_model
from dflop.errors import ConfigError
from dflop.models import load_family
from dflop.models.processor_settings import read_settings

WHOLE, IMAGES, VIDEOS = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"
QWEN2_5 = {"min_pixels": 3136, "max_pixels": 12845056, "image_processor_type": "Qwen2VLImageProcessor"}
QWEN3 = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
QWEN3_VIDEO = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}}
RELEASES = {
    "qwen2_vl_7b": {IMAGES: QWEN2_5},
    "qwen2_5_vl_7b": {IMAGES: QWEN2_5},
    "qwen3_vl_8b": {IMAGES: QWEN3, VIDEOS: QWEN3_VIDEO},
    "qwen2_5_omni_7b": {IMAGES: {**QWEN2_5, "feature_size": 128, "chunk_length": 300}},
    "internvl2_5_8b": {IMAGES: {"min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448}}},
    "llava_onevision_qwen2_5_7b": {IMAGES: {"size": {"height": 384, "width": 384}}},
    "qwen2_audio_7b": {IMAGES: {"feature_size": 128, "chunk_length": 30, "sampling_rate": 16000}},
}
"""What processors of released models state, as far as it decides sizes."""


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name in (WHOLE, IMAGES, VIDEOS):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def stated(folder: Path, family: str) -> dict[str, Any]:
    bare = load_family(family, {}, {})
    return {**bare.media, **read_settings(folder, bare).media}


@pytest.mark.parametrize("name", RELEASES)
def test_shipped_models_have_the_limits_of_the_released_ones(name, tmp_path):
    model = load_model(resources.path("configs") / "models" / f"{name}.yaml")
    bare = load_family(model.family, model.hf_config, {})
    found = read_settings(write(tmp_path, RELEASES[name]), bare)
    assert {**bare.media, **found.media} == load_family(model.family, model.hf_config, model.media).media
    assert found.not_followed == ()


EDGES = st.fixed_dictionaries({"shortest_edge": st.integers(1, 10**6), "longest_edge": st.integers(1, 10**8)})
SETTINGS = st.fixed_dictionaries(
    {},
    optional={"size": EDGES, "min_pixels": st.integers(1, 10**6) | st.none(), "max_pixels": st.integers(1, 10**8)},
)
SAMPLING = st.fixed_dictionaries({}, optional={
    "size": EDGES, "min_pixels": st.integers(1, 10**6), "fps": st.sampled_from([1, 0.5, 4]),
    "min_frames": st.integers(2, 8), "max_frames": st.integers(8, 900), "cap_pixels_per_frame": st.booleans(),
})  # fmt: skip


def folders(image: st.SearchStrategy[Any], video: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    whole = st.fixed_dictionaries({}, optional={"image_processor": image, "video_processor": video})
    return st.fixed_dictionaries({IMAGES: image}, optional={WHOLE: whole, VIDEOS: video})


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(folders(SETTINGS, SAMPLING))
def test_limits_of_pictures_equal_the_processors(tmp_path, files):
    expected = Qwen2VLImageProcessorPil.from_pretrained(write(tmp_path, files)).size
    found = stated(tmp_path, "qwen2_5_vl")
    assert (found["min_pixels"], found["max_pixels"]) == (expected["shortest_edge"], expected["longest_edge"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(folders(SETTINGS, SAMPLING), st.sampled_from(["qwen2_5_vl", "qwen3_vl"]))
def test_limits_of_videos_equal_the_processors(tmp_path, ask_processor, files, family):
    expected = ask_processor(family, options={}, folder=str(write(tmp_path, files)))
    found = stated(tmp_path, family)
    assert found["video_min_pixels"] == expected["size"]["shortest_edge"]
    assert found["video_max_pixels"] == expected["size"]["longest_edge"]
    # Qwen2-VL's class has no rate; the default is that of the published models.
    assert found["video_fps"] == (expected["fps"] or 2.0)
    assert found["video_min_frames"] == expected["min_frames"]
    assert found["video_max_frames"] == expected["max_frames"]
    assert found["cap_pixels_per_frame"] == bool(expected["cap_pixels_per_frame"])


def test_every_limit_names_the_entry_that_states_it(tmp_path):
    nested = {"image_processor": QWEN3, "video_processor": {**QWEN3_VIDEO, "fps": 1}}
    found = read_settings(write(tmp_path, {WHOLE: nested, IMAGES: {"max_pixels": 1}}), load_family("qwen3_vl", {}, {}))
    sources = {key: source.removeprefix(f"{tmp_path}/") for key, source in found.sources.items()}
    assert sources.keys() == found.media.keys()
    assert sources["max_pixels"] == "processor_config.json: image_processor.size.longest_edge"
    assert sources["video_fps"] == "processor_config.json: video_processor.fps"
    assert "video_max_frames" not in sources, "a default"


@pytest.mark.parametrize(
    ("family", "files", "told"),
    [
        ("qwen3_vl", {IMAGES: {"image_mean": [0.48, 0.45, 0.4]}}, "image_mean"),
        ("qwen3_vl", {IMAGES: {"patch_size": 14}}, "patch_size = 14"),
        ("qwen2_5_vl", {IMAGES: {}, VIDEOS: {"do_sample_frames": False}}, "do_sample_frames"),
        ("qwen2_5_vl", {WHOLE: {"video_processor": {"num_frames": 8}}}, "video_processor.num_frames = 8"),
        ("internvl", {IMAGES: {"size": {"height": 224, "width": 224}}}, "size"),
        ("llava_onevision", {IMAGES: {"image_grid_pinpoints": [[384, 384]]}}, "image_grid_pinpoints"),
        ("qwen2_audio", {WHOLE: {"feature_extractor": {"chunk_length": 60}}}, "feature_extractor.chunk_length = 60"),
        ("qwen2_5_omni_thinker", {IMAGES: {"sampling_rate": 8000}}, "sampling_rate = 8000"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_told(family, files, told, tmp_path):
    lines = read_settings(write(tmp_path, files), load_family(family, {}, {})).not_followed
    assert any(told in line and "is not supported" in line for line in lines)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({IMAGES: "{"}, "not JSON"),
        ({IMAGES: "[]"}, "is an object"),
        ({WHOLE: {"image_processor": 3}}, "`image_processor` is an object"),
        ({IMAGES: {"max_pixels": "many"}}, "not a positive whole number"),
        ({IMAGES: {"size": {"longest_edge": 5}}}, "`size` without `shortest_edge`"),
        ({VIDEOS: {"size": 448}}, "`size` without"),
        ({VIDEOS: {"fps": -1}}, "not a positive number"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_their_file(files, what, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_settings(write(tmp_path, files), load_family("qwen2_5_vl", {}, {}))
    assert what in caught.value.what
    assert caught.value.where.startswith(str(tmp_path / next(iter(files))))
