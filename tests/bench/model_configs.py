"""Default configs of model types, corrected where transformers' own defaults contradict themselves or leave gaps.

Released models state these entries; the defaults of their classes do not.
"""

from collections.abc import Mapping
from typing import Any

ROPE = "text_config.rope_parameters"
SPEECH = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "audio_start_token_id": 151647,
          "audio_end_token_id": 151648}  # fmt: skip
GLM = {f"{ROPE}.partial_rotary_factor": 0.5}
CORRECTED: Mapping[str, Mapping[str, Any]] = {
    "aria": {"vision_config.patch_size": 14, "vision_config.image_size": 980},
    "aya_vision": {"vision_config.num_attention_heads": 16, "vision_config.image_size": 364},
    "cohere_compass": {
        ROPE: {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "vision_config.out_hidden_size": 8192,
    },
    "cosmos3_omni": {"vision_config.out_hidden_size": 4096},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense"] + ["sparse"] * 31, "text_config.num_experts_per_tok": 6,
        **{f"vision_config.encoder_config.{key}": value for key, value in {
            "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        }.items()},
    },
    "gemma3": {"vision_config.image_size": 896, "vision_config.patch_size": 14},
    "glm46v": GLM,
    "glm4v": GLM,
    "glmga": GLM,
    "glm4v_moe": GLM | {"text_config.head_dim": 128},
    "granite4_vision": {"deepstack_layer_map": [[-4, 0], [-1, 2]], "downsample_rate": "4/8"},
    "hunyuan_vl": {"text_config.head_dim": 128, f"{ROPE}.mrope_section": [16, 16, 16, 16]},
    "idefics3": {"vision_config.image_size": 364, "vision_config.patch_size": 14},
    "lfm2_vl": {"text_config.layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "llama4": {"vision_config.hidden_size": 1408},
    "qwen2_5_omni": {f"thinker_config.{key}": value for key, value in SPEECH.items()},
    "qwen2_5_omni_thinker": SPEECH,
    "qwen3_omni_moe": {
        f"thinker_config.{key}": value
        for key, value in {
            **SPEECH, "text_config.head_dim": 128, "text_config.num_attention_heads": 32,
            "vision_config.out_hidden_size": 2048,
        }.items()
    },
    "qwen3_omni_moe_thinker": SPEECH | {"text_config.head_dim": 128, "text_config.num_attention_heads": 32},
    "smolvlm": {"vision_config.image_size": 364, "vision_config.patch_size": 14},
    "step3p7": {"text_config.sliding_window": 512},
}  # fmt: skip


WITHIN = {"mistral4": "mistral3"}
"""Types of text models -> the type that they are released in."""


def config_of(kind: str) -> Any:
    """The default config of a type, corrected."""
    import transformers

    config = transformers.AutoConfig.for_model(WITHIN.get(kind, kind))
    if kind in WITHIN:
        config = type(config).from_dict({**config.to_dict(), "text_config": {"model_type": kind}})
    # Sections that a default leaves out, as Gemma 4 its tower.
    for key in ("vision_config", "text_config", "audio_config"):
        section = config.sub_configs.get(key, transformers.AutoConfig)
        if section is not transformers.AutoConfig and getattr(config, key, None) is None:
            setattr(config, key, section())
    for path, value in CORRECTED.get(kind, {}).items():
        _put(config, path.split("."), value)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    if vision is not None and getattr(vision, "out_hidden_size", None) not in (
        None,
        getattr(text, "hidden_size", None),
    ):
        vision.out_hidden_size = text.hidden_size
    return config


def _put(target: Any, path: list[str], value: Any) -> None:
    *above, last = path
    for name in above[: -1 if above and above[-1] == "rope_parameters" else None]:
        target = target.get_text_config() if name == "text_config" else getattr(target, name)
    if above and above[-1] == "rope_parameters":
        target.rope_parameters = {**(target.rope_parameters or {}), last: value}
    else:
        setattr(target, last, value)
