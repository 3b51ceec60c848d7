"""Families of models whose bytes are measured: tiny, but wide enough for matrices to weigh more than norms."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.generic import classes
from dflop.models.generic.family import GenericFamily, shallow_config
from dflop.models.generic.specs import module_specs
from dflop.models.generic.structure import read_structure
from dflop.records import LLM
from tests.models.generic.configs import MORE, PARTS
from tests.models.generic.small import SmallFamily
from tests.train import synthetic

WIDTH, ENCODER_WIDTH = 128, 96
OMNI, CUTS_FRAMES = "qwen2_5_omni_thinker", "qwen3_vl"
ENCODER = {
    "depth": 4, "hidden_size": ENCODER_WIDTH, "intermediate_size": 2 * ENCODER_WIDTH, "out_hidden_size": WIDTH,
    "num_heads": 6,
}  # fmt: skip
TEXT = {
    "vocab_size": 1024, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}  # fmt: skip
WIDER = {
    "qwen3_5": {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "rope_parameters": {**TEXT["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
    },
    "lfm2_vl": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_vl_moe": {"head_dim": 32, "moe_intermediate_size": WIDTH, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Entries of text models without a family of their own."""


@cache
def family(name: str = OMNI, *, is_tied: bool = False) -> Family:
    if name in WIDER:
        return Counted(name)
    if name == CUTS_FRAMES:
        vision = {**ENCODER, "patch_size": 14, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
        text = {**TEXT, "head_dim": 32, "tie_word_embeddings": is_tied}
        config = {"vision_config": vision, "text_config": text, "tie_word_embeddings": is_tied}
        return load_family(name, config, {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 256})
    config = copy.deepcopy(synthetic.HF_CONFIG) | {"tie_word_embeddings": is_tied}
    config["vision_config"] |= ENCODER | {"fullatt_block_indexes": [0, 1, 2, 3]}
    config["audio_config"] |= {"d_model": ENCODER_WIDTH, "encoder_ffn_dim": 4 * ENCODER_WIDTH, "output_dim": WIDTH}
    config["audio_config"]["encoder_attention_heads"] = 6
    config["text_config"] |= TEXT | {"tie_word_embeddings": is_tied}
    return load_family(name, config, synthetic.family().media)


def token_ids(of: Family) -> dict[str, int]:
    """Entries of a family's config for tokens of media, as `SyntheticSource` has them."""
    kinds = ((t, synthetic.PLACEHOLDERS[kind]) for kind, t in of.media_tokens.items())
    return of.token_ids(
        {
            name: number
            for t, (begin, pad, end) in kinds
            for name, number in ((t.begin, begin), (t.pad, pad), (t.end, end))
        }
    )


class Counted(SmallFamily):
    """A model without a family, with specs that are read of its classes."""

    def __init__(self, kind: str) -> None:
        config = (PARTS | MORE)[kind]
        super().__init__(kind, {**config, "text_config": {**config["text_config"], **TEXT, **WIDER[kind]}})
        self.configs = {LLM: {"hidden_size": WIDTH, "vocab_size": TEXT["vocab_size"]}}
        self.structure = read_structure(classes.config_of(self.hf_config))

    def specs(self) -> Any:
        return tuple(module_specs(self.structure))

    def probe_depths(self, module: str, depths: Sequence[int]) -> tuple[int, ...]:
        return GenericFamily.probe_depths(self, module, depths)  # type: ignore[arg-type]  # it has specs

    def cut_to(self, module: str, num_layers: int) -> Counted:
        cut = copy.copy(self)
        depths = {name: num_layers if name == module else 1 for name in self._depths}
        cut.hf_config = shallow_config(self.hf_config, self.structure, depths)
        return cut
