import copy

import pytest

from dflop.models.generic.classes import build, find_decoder
from dflop.models.generic.shrink import VOCAB, shrunk
from dflop.models.generic.structure import read_structure
from tests.models.generic.configs import config_of

KIMI = {
    "first_k_dense_replace": 1, "num_hidden_layers": 9, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 3000,
}  # fmt: skip


def large(kind, **text):
    """A config of a type with more layers than the check keeps."""
    config = config_of(kind)
    content = config.to_dict()
    content["text_config"] |= text
    return type(config).from_dict(content)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gemma3", {"num_hidden_layers": 12, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}),
        ("qwen3_5", {"num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}),
        ("qwen3_vl_moe", {"num_hidden_layers": 12, "decoder_sparse_step": 2}),
    ],
)
def test_a_copy_has_two_layers_of_each_kind_and_leaves_the_config_as_it_is(kind, text):
    config = large(kind, **text)
    before, structure = copy.deepcopy(config.to_dict()), read_structure(config)
    small = shrunk(config, structure)
    found = read_structure(small)
    assert {kind.name for kind in found.kinds} == {kind.name for kind in structure.kinds}
    assert all(len(kind.layers) >= 2 for kind in found.kinds)
    assert found.num_layers < structure.num_layers
    assert found.hidden_size == 64
    assert config.to_dict() == before
    ids = [value for key, value in small.to_dict().items() if key.endswith(("_token_id", "_token_index")) and value]
    assert ids
    assert all(0 <= each < VOCAB for each in ids)
    assert len(set(ids)) == len(ids)


def test_rotary_sections_fill_half_of_the_smaller_head():
    config = large(
        "qwen3_vl_moe",
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]},
    )
    text = shrunk(config, read_structure(config)).text_config
    assert sum(text.rope_parameters["mrope_section"]) == text.head_dim // 2 == 16


def test_latent_attention_keeps_its_own_widths():
    import transformers

    config = transformers.CONFIG_MAPPING["kimi_k25"].from_dict({"model_type": "kimi_k25", "text_config": KIMI})
    structure = read_structure(config)
    assert [(kind.mixer, kind.num_experts) for kind in structure.kinds] == [
        ("latent attention", 0),
        ("latent attention", 8),
    ]
    small = shrunk(config, structure)
    call = read_structure(small).kinds[0].attention[0]
    assert (call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) == (2, 2, 32, 16)
    _, decoder = find_decoder(build(small, attention="eager"))
    assert len(decoder.layers) == 4
