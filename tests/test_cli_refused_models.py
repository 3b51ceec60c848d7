"""Folders that hold no model that dflop takes, through `dflop plan` and `dflop init`: exit 2, key and remedy."""

import json
import sys

import pytest

from dflop.cli import main
from dflop.store import console
from tests.data.helpers import chat
from tests.models.generic.configs import config_of

NO_FILES = ("processor_config.json", "tokenizer.json")
REFUSED = {
    "no processor": ({}, NO_FILES[:1], "no processor", "AutoProcessor.save_pretrained"),
    "no tokenizer": ({}, NO_FILES[1:], "no tokenizer", "AutoTokenizer.save_pretrained"),
    "remote code": ({"auto_map": {"AutoConfig": "x.Y"}}, (), "`auto_map`", "remove `auto_map`"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, (), "`quantization_config`", "bfloat16"),
    "contradicting": ({"text_config": {"num_key_value_heads": 3}}, (), "num_key_value_heads`: 3", "correct"),
    "text only": ({"model_type": "qwen3"}, (), "`model_type`: a `qwen3` takes text only", "an encoder"),
    "encoder and decoder": ({"model_type": "florence2"}, (), "`is_encoder_decoder`", "decoder takes media"),
}
"""Changed entries, missing files, what is said, and what to do."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text(json.dumps(chat("what?", "that")) + "\n")
    (model := tmp_path / "model").mkdir()
    config_of("gemma3").save_pretrained(model)
    for name in NO_FILES:
        (model / name).write_text("{}")
    return tmp_path


def refusal(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["dflop", *words])
    monkeypatch.setattr(console, "bound_process", lambda timeout_s: None)  # it would end this process
    with pytest.raises(SystemExit) as end:
        sys.exit(main())
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.count("dflop: ") == 1
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize("command", [("plan", "model", "data", "--device", "h100", "--gpus", "8"),
                                     ("init", "--model", "model", "--data", "data")], ids=("plan", "init"))  # fmt: skip
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_taken_ends_with_2(case, command, folder, monkeypatch, capsys):
    changes, missing, said, hint = REFUSED[case]
    path = folder / "model" / "config.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(content.get(key), dict) else value
    path.write_text(json.dumps(content))
    for name in missing:
        (folder / "model" / name).unlink()
    told = refusal(command, folder, monkeypatch, capsys)
    assert said in told
    assert hint in told


def test_an_adapter_is_refused_with_its_base_model(folder, monkeypatch, capsys):
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3.5-9B"}')
    told = refusal(("plan", "model", "data"), folder, monkeypatch, capsys)
    assert "holds an adapter" in told
    assert "`Qwen/Qwen3.5-9B`" in told
