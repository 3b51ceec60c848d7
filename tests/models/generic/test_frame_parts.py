"""Which towers' frames ranks may cut: those that attend over whole frames, by a run of a small copy."""

import pytest

from dflop.models.generic.classes import config_of, trained_config
from dflop.models.generic.exact import small_model
from dflop.models.generic.frame_parts import merge_tokens_of
from dflop.models.generic.specs import places_of
from dflop.models.generic.structure import read_structure
from tests.models.generic.configs import MORE, NATIVE, PARTS, TEXT

WINDOWS = {
    "image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6,
    "vision_config": NATIVE | {"window_size": 56, "fullatt_block_indexes": [1], "patch_size": 14},
    "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
}  # fmt: skip
CASES = {
    "qwen3_vl_moe": (PARTS["qwen3_vl_moe"], 4), "qwen3_5_moe": (MORE["qwen3_5_moe"], 4),
    "glm4v_moe": (MORE["glm4v_moe"], 4), "qwen2_5_vl": (WINDOWS, 0), "gemma3": (PARTS["gemma3"], 0),
    "mistral3": (PARTS["mistral3"], 0), "lfm2_vl": (MORE["lfm2_vl"], 0),
    "ernie4_5_vl_moe": ({}, 0),
}  # fmt: skip
"""(config, tokens of a row; 0 where frames stay whole) by model type."""


@pytest.mark.parametrize("kind", CASES)
def test_a_small_copy_shows_whether_frames_can_be_cut(kind):
    content, merge_tokens = CASES[kind]
    config = trained_config(config_of({"model_type": kind, **content}))
    structure = read_structure(config)
    assert merge_tokens_of(small_model(config, structure)[0], places_of(structure)) == merge_tokens
