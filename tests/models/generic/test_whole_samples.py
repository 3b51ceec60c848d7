"""Whether ranks may share samples of a model (context parallelism), by the kinds of its layers."""

import pytest

from dflop.models.generic.classes import config_of, trained_config
from dflop.models.generic.exact import small_model
from dflop.models.generic.llm_stage import why_whole
from dflop.models.generic.specs import places_of
from dflop.models.generic.structure import read_structure
from tests.models.generic.configs import EXPERTS, MORE, PARTS, TEXT, VIT

TILED = MORE["internvl"]
LATENT = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
CASES = {
    "full": ("smolvlm", PARTS["smolvlm"], ""),
    "full, deep features, experts": ("qwen3_vl_moe", PARTS["qwen3_vl_moe"], ""),
    "sliding": ("cohere2_vision", MORE["cohere2_vision"], ""),
    "latent": ("internvl", TILED | {"text_config": TEXT | EXPERTS | LATENT | ROUTED}, ""),
    "gated delta": ("qwen3_5_moe", MORE["qwen3_5_moe"], ""),
    "convolution": ("lfm2_vl", MORE["lfm2_vl"], ""),
    "images": ("gemma3", PARTS["gemma3"], "Gemma3Attention lets tokens of an image see each other"),
    "cap": (
        "internvl", TILED | {"text_config": TEXT | {"model_type": "gemma2"}},
        "Gemma2Attention caps scores or has sinks",
    ),
    "sinks": (
        "internvl", TILED | {"text_config": TEXT | {"model_type": "gpt_oss", "num_local_experts": 4}},
        "GptOssAttention caps scores or has sinks",
    ),
    "chunks": (
        "llama4",
        {
            "vision_config": VIT | dict.fromkeys(("projector_input_dim", "projector_output_dim"), 64) | {
                "vision_output_dim": 64, "patch_size": 14,
            },
            "text_config": TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 96},
        },
        "Llama4TextAttention sees keys of the same chunk of 8 tokens",
    ),
}  # fmt: skip
"""(type, config, what keeps a sample on one rank; nothing where ranks may share it)."""


@pytest.mark.parametrize("name", CASES)
def test_the_engine_says_why_ranks_share_no_samples(name):
    kind, content, why = CASES[name]
    config = trained_config(config_of({"model_type": kind, **content}))
    structure = read_structure(config)
    found = why_whole(small_model(config, structure)[0], places_of(structure))
    assert found == (f"ranks cannot share a sample (cp): {why}" if why else "")
