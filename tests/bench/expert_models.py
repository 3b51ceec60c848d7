"""Two models with experts, as released: their LLM's layers from transformers' classes, their tower and media by rule.

Both have Qwen3-VL's tower, that of Qwen3.5 without deep features; media become tokens as Qwen3-VL's do.
"""

from collections.abc import Mapping
from typing import Any

from dflop.models import counts
from dflop.models.families.qwen3_vl import Qwen3Vl
from dflop.models.generic.exact import small_model
from dflop.models.generic.llm_stage import why_whole
from dflop.models.generic.specs import module_specs, places_of
from dflop.models.generic.structure import read_structure
from dflop.records import LLM, ModuleSpec

_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 2048,
}  # fmt: skip
RELEASED: Mapping[str, tuple[str, Mapping[str, Any], tuple[int, ...]]] = {
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", {}, ()),  # the class's own defaults
    "Qwen3-VL-30B-A3B": (
        "qwen3_vl_moe",
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False},
        (8, 16, 24),
    ),
}  # fmt: skip
"""(model type, entries of the text model that differ from its class's, layers with deep features) by name."""
MEDIA = {"min_pixels": 65536, "max_pixels": 16777216, "video_min_pixels": 4096, "video_max_pixels": 25165824}
"""As Qwen3-VL's releases state them."""


class ExpertModel(Qwen3Vl):
    """A released model by name, which the engine trains as family `generic`."""

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig

        self.model_type, text, deep = RELEASED[name]
        vision = {**_VISION, "deepstack_visual_indexes": list(deep)}
        config = AutoConfig.for_model(self.model_type, text_config=dict(text))
        for key, value in _VISION.items():
            setattr(config.vision_config, key, value)
        if deep:
            config.vision_config.deepstack_visual_indexes = list(deep)
        super().__init__({"vision_config": vision, "text_config": {"hidden_size": vision["out_hidden_size"]}}, MEDIA)
        self.structure = read_structure(config)
        self.whole_samples = why_whole(small_model(config, self.structure)[0], places_of(self.structure))

    def specs(self) -> tuple[ModuleSpec, ...]:
        (llm,) = (spec for spec in module_specs(self.structure) if spec.module == LLM)
        return counts.qwen3_vision(self.vision), llm
