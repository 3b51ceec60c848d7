"""A model's own `config.json` gives the model that the shipped configurations describe by hand."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop import resources
from dflop.config import load_model
from dflop.errors import ConfigError
from dflop.models import FAMILIES, load_family
from dflop.models.hub import TYPES, read_hub_model
from dflop.models.unsupported import EXPERTS
from dflop.models.weights import hf_types
from tests.models.generic.configs import config_of

MODELS = sorted((resources.path("configs") / "models").glob("*.yaml"))


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder / "config.json"


def hub_config(path: Path) -> dict[str, Any]:
    """What Hugging Face would have written for a shipped model."""
    model = load_model(path)
    family = load_family(model.family, model.hf_config, model.media)
    return hf_types(family, model.hf_config)[0].to_dict()


def test_every_family_has_a_model_type():
    assert {family for family, _ in TYPES.values()} == set(FAMILIES)


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_a_file_of_hugging_face_gives_the_shipped_model_and_leaves_out_defaults(path, tmp_path):
    model, content = load_model(path), hub_config(path)
    found = read_hub_model(write(tmp_path, content))
    wanted = load_family(model.family, model.hf_config, model.media)
    assert found.family.name == model.family
    assert found.family.specs() == wanted.specs()
    assert found.num_params == sum(s.num_params for s in wanted.specs())
    config_class = transformers.CONFIG_MAPPING[found.family.name]
    again, stated = config_class(**found.hf_config).to_dict(), config_class.from_dict(content).to_dict()
    noise = ("dtype", "_name_or_path", "transformers_version", "use_cache")
    for section in {"text_config", "vision_config", "audio_config"} & set(stated):
        differs = {
            k: (v, again[section].get(k))
            for k, v in stated[section].items()
            if k not in noise and not k.endswith("_token_id") and again[section].get(k) != v
        }
        assert differs == {}, section
    assert len(json.dumps(found.hf_config)) < 2500, "short enough to read"


VISION = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
                 "model_type": "qwen2_vl", "spatial_patch_size": 14},
    "qwen2_5_vl": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                   "out_hidden_size": 3584, "tokens_per_second": 2, "window_size": 112},
}  # fmt: skip


@pytest.mark.parametrize("kind", VISION)
def test_an_older_flat_file_is_read(kind, tmp_path):
    """As transformers 4 wrote it: the language model's entries at the top, rope in two of them."""
    flat = {
        "model_type": kind, "torch_dtype": "bfloat16", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "image_token_id": 151655,
        "vision_config": VISION[kind],
    }  # fmt: skip
    found = read_hub_model(write(tmp_path, flat))
    shipped = load_model(resources.path("configs") / "models" / f"{kind}_7b.yaml")
    assert found.family.specs() == load_family(shipped.family, shipped.hf_config, shipped.media).specs()
    assert found.hf_config["text_config"]["rope_parameters"]["mrope_section"] == [16, 24, 24]
    assert "image_token_id" not in found.hf_config
    assert found.dtype == "bfloat16"


def test_the_thinker_of_an_omni_model_is_taken(tmp_path):
    thinker = hub_config(resources.path("configs") / "models" / "qwen2_5_omni_7b.yaml")
    found = read_hub_model(write(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": thinker, "talker": {}}))
    assert found.family.name == "qwen2_5_omni_thinker"
    with pytest.raises(ConfigError, match="no `thinker_config`"):
        read_hub_model(write(tmp_path, {"model_type": "qwen2_5_omni"}))


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        ({"model_type": "llava_onevison"}, "knows no `llava_onevison`", "mean `llava_onevision`?"),
        ({"model_type": "internvl_chat"}, "`model_type` `internvl_chat`: the model comes", "`-hf`, of type `internvl`"),
        (
            {"model_type": "gemma3", "auto_map": {"AutoConfig": "x.Y"}},
            "`auto_map`: the model",
            "remove `auto_map`",
        ),
        ({"model_type": "llama"}, "`model_type`: a `llama` takes text only", "an encoder of images"),
        ({"model_type": "florence2"}, "`is_encoder_decoder`", "decoder takes media"),
        (
            {"model_type": "gemma3", "text_config": {"num_attention_heads": 4, "num_key_value_heads": 3}},
            "3 does not divide 4",
            "correct `text_config.num_key_value_heads`",
        ),
        ({}, "`model_type`: the config has none", "as transformers saves it"),
        ([], "a model's config is an object, not a list", ""),
        ({"model_type": "internvl", "vision_config": 3}, "cannot read it", "InternVLConfig"),
    ],
)
def test_what_is_no_model_is_refused(content, what, hint, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_hub_model(write(tmp_path, content))
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "what", "key"),
    [
        ({"model_type": "qwen2_5_vl", "vision_config": {"model_type": "qwen2_vl_vision"}}, "another tower", "vision"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"model_type": "qwen2_vl"}}, "another tower", "vision_config"),
        ({"model_type": "internvl", "vision_config": {"model_type": "siglip_vision_model"}}, "another tower", "vision"),
        *(
            ({"model_type": family, "text_config": {"model_type": kind}}, "the family has no language model", "text")
            for family, kind in (
                ("qwen3_vl", "qwen3_vl_moe_text"), ("internvl", "qwen3_moe"), ("internvl", "gpt_oss"),
                ("llava_onevision", "mixtral"), ("llava_onevision", "qwen2_moe"),
            )
        ),
        (
            {"model_type": "llava_onevision", "text_config": {"model_type": "gemma3_text"}},
            "the family has no language model of type `gemma3_text`", "text_config.model_type",
        ),
        *(({"model_type": "qwen3_vl", "text_config": {k: 8}}, "without experts", f"text_config.{k}") for k in EXPERTS),
        ({"model_type": "qwen2_5_vl", "quantization_config": {"quant_method": "awq"}}, "quantized (awq)", ""),
        ({"model_type": "qwen3_vl", "text_config": {"quantization_config": {"quant_method": "fp8"}}}, "(fp8)", ""),
        ({"model_type": "internvl", "compression_config": {"format": "pack"}}, "`compression_config`", ""),
    ],
)  # fmt: skip
def test_another_model_under_a_known_name_is_refused(content, what, key, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_hub_model(write(tmp_path, content))
    assert what in caught.value.what
    assert caught.value.where.startswith(f"{tmp_path / 'config.json'}{': ' * bool(key)}{key}")


def test_a_folder_without_processor_or_tokenizer_says_what_is_missing(tmp_path):
    path = write(tmp_path, config_of("gemma3").to_dict())
    with pytest.raises(ConfigError, match="no processor: the folder has none of"):
        read_hub_model(path)
    write(tmp_path, {}, "processor_config.json")
    with pytest.raises(ConfigError, match="no tokenizer"):
        read_hub_model(path)


sections = st.sampled_from(["vision_config", "text_config", "audio_config", "rope_parameters"])
entries = st.sampled_from([
    "depth", "hidden_size", "num_heads", "patch_size", "spatial_merge_size", "fullatt_block_indexes", "model_type",
    "num_hidden_layers", "num_attention_heads", "image_size", "layer_types", "rope_theta", "head_dim",
])  # fmt: skip
values = st.sampled_from([None, 0, -1, 3, 0.5, "x", [], [1], {}, {"a": 1}, True, 10**12])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(TYPES)), st.lists(st.tuples(sections, entries, values), max_size=3))
def test_odd_entries_are_read_or_refused_but_never_a_traceback(tmp_path, kind, odd):
    content = {"model_type": kind}
    inner = content if not TYPES[kind][1] else content.setdefault(TYPES[kind][1], {})
    for section, entry, value in odd:
        inner.setdefault(section, {})[entry] = value
    with contextlib.suppress(ConfigError):
        read_hub_model(write(tmp_path, content))


def test_a_file_that_is_missing_or_no_json(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_hub_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_hub_model(tmp_path / "config.json")
