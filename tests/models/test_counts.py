"""Sizes computed from configs equal the real models', tiny and published, to the parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from ruamel.yaml import YAML

from dflop.errors import ConfigError
from dflop.models import counts, load_family
from dflop.models.family import Family
from dflop.models.weights import hf_types
from dflop.records import LLM, ModuleSpec
from tests.models.tiny_families import CASES, LLAVA, TEXT
from tests.train.synthetic import HF_CONFIG

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
REAL_SIZE = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "tiny_omni")
ENTRIES = {
    "native": ("patch_embed", "pos_embed"),
    "mel": ("conv1", "conv2"),
    "windows": ("conv1", "conv2", "embed_positions"),
    "tiles": ("embeddings",),
    "anyres": ("embeddings",),
}
"""Per way of calling a tower, the modules in front of its layers; a tower may lack some."""
PUBLISHED = {
    "internvl2_5_8b": 8.08e9,
    "internvl2_5_78b": 78.4e9,
    "llava_onevision_qwen2_5_7b": 8.03e9,
    "qwen2_vl_7b": 8.29e9,
    "qwen2_5_vl_7b": 8.29e9,
    "qwen3_vl_8b": 8.77e9,
    "qwen2_audio_7b": 8.40e9,
}
"""Size of the checkpoint as the model's page on the Hugging Face hub states it ("Model size", from the safetensors
headers): InternVL2_5-8B, InternVL2_5-78B, llava-onevision-qwen2-7b-ov-hf, Qwen2-VL-7B-Instruct,
Qwen2.5-VL-7B-Instruct, Qwen3-VL-8B-Instruct, Qwen2-Audio-7B-Instruct. Qwen2.5-Omni's covers talker and vocoder, too."""
PUBLISHED_MODULES = {
    ("llava_onevision_llama3_8b", LLM): 8.03e9,  # Meta-Llama-3-8B
    ("llava_onevision_qwen2_5_7b", LLM): 7.62e9,  # Qwen2.5-7B, "7.61B" in its model card
    ("llava_onevision_qwen2_5_32b", LLM): 32_763_876_352,  # Qwen2.5-32B, half the bytes its safetensors index states
    ("llava_onevision_qwen2_5_72b", LLM): 72.7e9,  # Qwen2.5-72B, "72.7B" in its model card
    ("internvl2_5_78b", LLM): 72.7e9,
}


def read(name: str) -> Family:
    stated = YAML(typ="safe").load(CONFIGS / f"{name}.yaml")
    return load_family(stated["family"], stated["hf_config"], stated["media"])


def meta_model(family: Family) -> torch.nn.Module:
    config, model_class = hf_types(family, family.hf_config)
    with torch.device("meta"):
        return model_class._from_config(config)


def num_params(parameters) -> int:
    return sum({id(p): p.numel() for p in parameters}.values())


def assert_specs_equal(family: Family, model: torch.nn.Module) -> None:
    specs = {spec.module: spec for spec in family.specs()}
    assert tuple(specs) == family.modules
    named = dict(model.named_parameters())
    for module, tower in family.towers.items():
        paths = (tower.path, *tower.extras)
        whole = [p for n, p in named.items() if any(n == path or n.startswith(f"{path}.") for path in paths)]
        config = model.get_submodule(tower.path).config
        width = getattr(config, "d_model", getattr(config, "embed_dim", config.hidden_size))
        heads = getattr(config, "num_heads", None)
        assert specs[module].hidden_size == width
        assert specs[module].kinds[0].num_heads == (heads or config.num_attention_heads)
        assert_spec_equals(specs[module], whole, model.get_submodule(f"{tower.path}.{tower.layers}"))
        own = {n.removeprefix(f"{tower.path}."): p for n, p in named.items() if n.startswith(f"{tower.path}.")}
        entry = [p for n, p in own.items() if n.partition(".")[0] in ENTRIES[tower.call]]
        deep = [p for n, p in own.items() if n.startswith("deepstack_merger_list.")]
        assert (specs[module].num_entry_params, specs[module].num_deep_params) == (num_params(entry), num_params(deep))
        layers = {id(p) for p in model.get_submodule(f"{tower.path}.{tower.layers}").parameters()}
        behind = [p for p in whole if not layers & {id(p)} and not any(p is q for q in entry)]
        assert specs[module].num_projector_matrix_params == max(p.numel() for p in behind)
    decoder = model.get_submodule(family.decoder.path)
    whole = [*decoder.parameters(), *model.get_submodule(family.decoder.head).parameters()]
    assert_spec_equals(specs[LLM], whole, decoder.layers)
    config = decoder.config
    (kind,) = specs[LLM].kinds
    assert (specs[LLM].hidden_size, kind.num_heads, kind.num_kv_heads) == (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    )  # fmt: skip
    head, embedding = model.get_submodule(family.decoder.head), decoder.embed_tokens
    assert (specs[LLM].vocab_size, specs[LLM].is_tied) == (len(head.weight), head.weight is embedding.weight)
    assert specs[LLM].num_entry_params == embedding.weight.numel()
    assert sum(spec.num_params for spec in specs.values()) == num_params(model.parameters())


def assert_spec_equals(spec: ModuleSpec, whole: list[torch.nn.Parameter], layers: torch.nn.ModuleList) -> None:
    assert spec.num_layers == len(layers)
    assert {num_params(layer.parameters()) for layer in layers} == {kind.num_params for kind in spec.kinds}
    assert spec.num_params == num_params(whole), spec.module
    linears = [(n, m) for n, m in layers[0].named_modules() if isinstance(m, torch.nn.Linear)]
    widths = {n.rpartition(".")[2]: m.out_features for n, m in linears}
    (into, *_) = (n for n in ("gate_proj", "up_proj", "fc1", "linear_fc1") if n in widths)
    (kind,) = spec.kinds
    assert (kind.mlp_width, kind.is_gated_mlp) == (widths[into], "gate_proj" in widths)
    assert kind.query_width + 2 * kind.key_width == sum(
        widths.get(n, 0) for n in ("q_proj", "k_proj", "v_proj", "q", "k", "v", "qkv")
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tiny_sizes_equal_the_built_models(case):
    assert_specs_equal(case.family, case.build())


def test_real_sizes_are_the_published_ones():
    totals = {name: sum(spec.num_params for spec in read(name).specs()) for name in PUBLISHED}
    assert totals == {name: pytest.approx(size, rel=1e-3) for name, size in PUBLISHED.items()}
    for (name, module), size in PUBLISHED_MODULES.items():
        (spec,) = (s for s in read(name).specs() if s.module == module)
        assert spec.num_params == pytest.approx(size, rel=1e-3)


VARIANTS = {
    "tied by the text section": ("llava_onevision", LLAVA | {"text_config": TEXT | {"tie_word_embeddings": True}}),
    "SigLIP with its pooling head": (
        "llava_onevision", LLAVA | {"vision_config": LLAVA["vision_config"] | {"vision_use_head": True}},
    ),
    "projector without bias": ("llava_onevision", LLAVA | {"multimodal_projector_bias": False}),
    "Llama with fewer keys": (
        "llava_onevision",
        LLAVA | {"text_config": TEXT | {"model_type": "llama", "num_key_value_heads": None, "head_dim": 16}},
    ),
    "Qwen3": (
        "llava_onevision",
        LLAVA | {"text_config": TEXT | {"model_type": "qwen3", "head_dim": 32, "attention_bias": True}},
    ),
    "mask token": ("internvl", {"vision_config": {"use_mask_token": True}, "text_config": TEXT}),
    "no positions": ("internvl", {"vision_config": {"use_absolute_position_embeddings": False}, "text_config": TEXT}),
    "tied as Qwen2.5-VL-3B": ("qwen2_5_vl", {"text_config": TEXT | {"tie_word_embeddings": True}}),
    "tied as Qwen3-VL-2B": ("qwen3_vl", {"tie_word_embeddings": True, "text_config": TEXT}),
    "tied in vain": ("qwen2_audio", {"tie_word_embeddings": True, "text_config": TEXT}),
    "tiny Omni": ("qwen2_5_omni_thinker", HF_CONFIG),
    "tied Omni": ("qwen2_5_omni_thinker", HF_CONFIG | {"tie_word_embeddings": True}),
    "LLaVA-OneVision's defaults": ("llava_onevision", {}),
    "InternVL's defaults": ("internvl", {}),
    "Qwen2-VL's defaults": ("qwen2_vl", {"text_config": {"hidden_size": 3584, "num_attention_heads": 28}}),
    "Qwen2.5-VL's defaults": ("qwen2_5_vl", {"vision_config": {}, "text_config": {}}),
    "Qwen3-VL's defaults": ("qwen3_vl", {}),
    "Qwen2-Audio's defaults": ("qwen2_audio", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REAL_SIZE, *VARIANTS])
def test_real_sizes_options_and_defaults_equal_the_models(name):
    family = load_family(*VARIANTS[name], {}) if name in VARIANTS else read(name)
    assert_specs_equal(family, meta_model(family))


@pytest.mark.parametrize("kind", counts.DEFAULTS)
def test_defaults_are_those_of_hugging_face(kind):
    config = transformers.AutoConfig.for_model(kind)
    for key, value in counts.DEFAULTS[kind].items():
        stated = getattr(config, key)
        if key in ("image_size", "patch_size") and not isinstance(stated, int):
            stated = stated[0]
        if value is not None:  # None: as many as heads, which Hugging Face's class fills in
            assert stated == value or list(stated) == list(value), key


def test_an_unknown_decoder_is_named_when_its_size_is_asked_for():
    family = load_family("llava_onevision", LLAVA | {"text_config": {"model_type": "qwen9"}}, {})
    with pytest.raises(ConfigError, match="no language model of type `qwen9`"):
        family.specs()


def test_tensor_parallel_degrees_share_heads_and_columns_evenly():
    tp = {(name, spec.module): spec.tp_choices for name in REAL_SIZE for spec in read(name).specs()}
    assert tp["qwen2_5_vl_7b", LLM] == (1, 2, 4)  # 4 key and value heads
    assert tp["qwen2_5_vl_7b", "vision"] == (1, 2, 4)  # an MLP of 3420 columns
    assert tp["internvl2_5_78b", "vision"] == (1,)  # query and key normalised over all heads
    assert tp["internvl2_5_78b", LLM] == tp["llava_onevision_llama3_8b", "vision"] == (1, 2, 4, 8)
    assert tp["qwen2_audio_7b", "audio"] == (1, 2, 4)  # 20 heads
    assert tp["llava_onevision_qwen2_5_32b", LLM] == tp["llava_onevision_qwen2_5_72b", LLM] == (1, 2, 4, 8)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("name", [name for name in REAL_SIZE if name.endswith(("omni_7b", "_8b", "_7b"))])
def test_shallow_modules_keep_width_and_edge(name, num_layers):
    family = read(name)
    specs = {spec.module: spec for spec in family.specs()}
    for module in family.modules:
        shallow = load_family(family.name, family.shallow(module, num_layers), family.media)
        assert_specs_equal(shallow, meta_model(shallow))
        for spec in shallow.specs():
            assert spec.num_layers == (num_layers if spec.module == module else 1)
            assert spec.kinds == specs[spec.module].kinds
            assert spec.num_edge_params == specs[spec.module].num_edge_params
            assert spec.tp_choices == specs[spec.module].tp_choices
