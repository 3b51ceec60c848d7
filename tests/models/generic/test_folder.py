import json

import pytest

from dflop.errors import ConfigError
from dflop.models.generic.folder import read_folder
from tests.models.generic.configs import config_of

REFUSED = {
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "`quantization_config`", "bfloat16"),
    "remote code": ({"auto_map": {"AutoConfig": "x.Y"}}, "`auto_map`", "remove `auto_map`"),
    "remote code of an unknown type": ({"auto_map": {"AutoConfig": "x.Y"}, "model_type": "own"}, "`auto_map`", "-hf"),
    "unknown type": ({"model_type": "qwen3_55"}, "knows no `qwen3_55`", "did you mean `qwen3_5`"),
    "text only": ({"model_type": "qwen3"}, "a `qwen3` takes text only", "encoder"),
    "encoder and decoder": ({"model_type": "florence2"}, "`is_encoder_decoder`", "decoder takes media"),
    "indexer": (
        {"model_type": "qwen4_exp", "text_config": {}}, "`text_config.layer_types`: in layers of type `indexed_att",
        "use a model with full",
    ),
    "layer types": ({"text_config.num_hidden_layers": 5}, "`num_hidden_layers` (5)", "defaults of Qwen3_5Config"),
    "rope": ({"text_config.head_dim": 32}, "adds up to 4, half of a rotary head is 8", "mrope_section"),
    "widths": ({"vision_config.out_hidden_size": 48}, "rows of 48 for a decoder of width 64", "out_hidden_size"),
    "negative": ({"text_config.hidden_size": -64}, "`text_config.hidden_size`: -64 is not a pos", "correct"),
    "no layers": ({"vision_config.depth": 0}, "0 is not a positive number", "correct"),
    "experts": (
        {"text_config.num_experts": 4, "text_config.num_experts_per_tok": 9},
        "9 experts for a token, of 4",
        "correct",
    ),
    "heads": ({"text_config.num_key_value_heads": 3}, "3 does not divide 4", "num_key_value_heads"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    config_of("qwen3_5").save_pretrained(tmp_path)
    for name in ("processor_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_cannot_be_checked_says_which_key_and_what_to_do(folder, case):
    changes, what, hint = REFUSED[case]
    content = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *above, last = key.split(".")
        (content[above[0]] if above else content)[last] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_folder(folder)
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "what"), [("processor_config.json", "no processor"), ("tokenizer.json", "no tokenizer")]
)
def test_a_folder_without_processor_or_tokenizer_is_refused(folder, name, what):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=what):
        read_folder(folder)


def test_an_adapter_is_refused_with_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3.5-9B"}))
    with pytest.raises(ConfigError, match="adapter") as caught:
        read_folder(tmp_path)
    assert "`Qwen/Qwen3.5-9B`" in caught.value.hint


def test_a_config_is_read_by_its_folder_or_by_its_file(folder):
    assert read_folder(folder).to_dict() == read_folder(folder / "config.json").to_dict()


def test_infinity_is_read_as_transformers_writes_it(folder):
    content = json.loads((folder / "config.json").read_text())
    content["limits"] = [0.0, {"__float__": "Infinity"}]
    (folder / "config.json").write_text(json.dumps(content))
    assert read_folder(folder).limits == [0.0, float("inf")]
