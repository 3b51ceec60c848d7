"""Small configs of model types that no family of dflop's knows: the checks take seconds."""

import transformers

TEXT = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
NATIVE = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PARTS = {
    "qwen3_5": {
        **IDS, "vision_config": NATIVE | {"num_position_embeddings": 16},
        "text_config": TEXT | {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    },
    "qwen3_vl_moe": {
        **IDS, "vision_config": NATIVE | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        "text_config": TEXT | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
            "rope_parameters": MROPE,
        },
    },
    "gemma3": {
        "image_token_index": 3, "mm_tokens_per_image": 4, "vision_config": {**VIT, "patch_size": 14},
        "text_config": TEXT | {
            "sliding_window": 8, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    },
    "smolvlm": {
        "image_token_id": 3, "scale_factor": 2, "vision_config": {**VIT, "patch_size": 14},
        "text_config": {"model_type": "llama", **TEXT},
    },
    "mistral3": {
        "image_token_index": 3, "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", **VIT, "patch_size": 14, "head_dim": 16},
        "text_config": {"model_type": "mistral", "sliding_window": None, **TEXT},
    },
}  # fmt: skip
LINEAR = PARTS["qwen3_5"]["text_config"]
MORE = {
    "qwen3_5_moe": {
        **PARTS["qwen3_5"],
        "text_config": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    },
    "glm4v_moe": {
        **IDS, "image_start_token_id": 7, "image_end_token_id": 8,
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
            "image_size": 56, "patch_size": 14,
        },
        "text_config": TEXT | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    },
    "cohere2_vision": {
        "image_token_id": 3, "downsample_factor": 2, "alignment_intermediate_size": 64,
        "vision_config": {**VIT, "patch_size": 14},
        "text_config": TEXT | {
            "model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    },
    "internvl": {
        "image_token_id": 3, "downsample_ratio": 0.5, "image_seq_length": 4,
        "vision_config": {**VIT, "image_size": [56, 56], "patch_size": [14, 14]},
        "text_config": {"model_type": "qwen3_moe", **TEXT, **EXPERTS},
    },
    "lfm2_vl": {
        "image_token_id": 3, "downsample_factor": 2, "projector_hidden_size": 64,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_patches": 16, "patch_size": 14,
        },
        "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["full_attention", "conv"] * 2},
    },
    "gemma4_unified": {
        **IDS, "audio_config": None, "audio_token_id": 8,
        "vision_config": {
            "patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32,
        },
        "text_config": TEXT | {
            "sliding_window": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    },
}  # fmt: skip
"""Of types whose parts are those of others, in other combinations: for the engine alone."""


def config_of(kind):
    """A small config of a type, made anew."""
    return transformers.CONFIG_MAPPING[kind].from_dict({"model_type": kind, **PARTS[kind]})
