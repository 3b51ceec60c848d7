"""What a folder of adapters says to `peft`, and what it cannot hold."""

from __future__ import annotations

import json

import pytest
import torch

from dflop.config import LoraConfig
from dflop.errors import ConfigError
from dflop.jobs.adapter_folder import check_adapters_alone, write_adapters
from dflop.models.lora import add_adapters, merged
from dflop.models.weights import load_folder, write_folder
from dflop.records import LLM
from tests.builders import make_inline_plan
from tests.jobs.configs import make_config
from tests.train import synthetic
from tests.train.adapted import PEFT, fill, import_peft


def config_of(folder, lora, *overrides):
    config = make_config(folder, f"model.weights={folder}", *overrides)
    return config.model_copy(update={"train": config.train.model_copy(update={"lora": lora})})


@pytest.mark.skipif(not PEFT.is_dir(), reason="peft is not there: make references")
@pytest.mark.parametrize(("targets", "named"), [(("o_proj",), ["o_proj"]), (("q_proj", "down_proj"), None)])
def test_peft_loads_the_folder_and_makes_the_logits_of_merged_weights(tmp_path, targets, named):
    family, hf_config = synthetic.family(), synthetic.hf_config(tied=False)
    base = synthetic.tiny_model()
    write_folder(family, hf_config, dict(base.named_parameters()), tmp_path / "base", max_shard_bytes=10**9)
    model, lora = synthetic.tiny_model(), LoraConfig(targets={LLM: targets}, rank=2, alpha=6)
    adapters = add_adapters(model, family, lora)
    fill(model, adapters)
    weights = dict(model.named_parameters())
    config = config_of(tmp_path / "base", lora)
    (tmp_path / "out").mkdir()
    write_adapters(
        config, {name: weights[name].detach() for name in adapters.shapes}, model, adapters, tmp_path / "out"
    )
    about = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    # Encoders have Linears named q_proj and down_proj, too.
    assert about["target_modules"] == (named or sorted(adapters.linears))
    assert about["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = import_peft().PeftModel.from_pretrained(load_folder(family, tmp_path / "base"), tmp_path / "out").eval()
    given = {"input_ids": torch.arange(5, 25)[None]}
    with torch.no_grad():
        before = base.eval()(**given).logits
        base.load_state_dict(merged(weights, adapters), strict=False)
        want, got = base(**given).logits, loaded(**given).logits
    assert not torch.allclose(before, want, rtol=1e-2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_what_adapters_alone_are_not_is_refused_with_the_command_that_writes_it(tmp_path):
    lora = LoraConfig(targets={LLM: ("q_proj",)})
    plan = make_inline_plan(1)
    encoders = [m.module for m in plan.modules if m.module != LLM]
    frozen = f"model.frozen=[{', '.join(encoders)}]"
    check_adapters_alone(config_of(tmp_path, lora, frozen), plan)
    with pytest.raises(ConfigError, match=f"`{encoders[0]}` trained without adapters") as raised:
        check_adapters_alone(config_of(tmp_path, lora), plan)
    assert "--merged" in raised.value.hint
    config = config_of(tmp_path, lora, frozen)
    random = config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})
    with pytest.raises(ConfigError, match="the base is random weights"):
        check_adapters_alone(random, plan)
