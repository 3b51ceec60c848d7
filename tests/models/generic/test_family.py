"""The family of types without a file, held against the families that have one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflop.errors import ConfigError
from dflop.models import load_family
from dflop.models.generic.facts import facts_key
from tests.models.generic.configs import config_of


def test_a_generic_model_without_a_processor_is_refused_with_the_key():
    with pytest.raises(ConfigError) as caught:
        load_family("generic", config_of("qwen3_5").to_dict(), {})
    assert caught.value.where == "model.processor"


def test_facts_are_of_config_and_settings(tmp_path):
    config = config_of("qwen3_5").to_dict()
    first = facts_key(config, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    second = facts_key(config, tmp_path)
    assert len({first, second, facts_key(config | {"image_token_id": 7}, tmp_path)}) == 3
    assert facts_key(json.loads(json.dumps(config)), tmp_path) == second


def test_facts_are_named_without_torch_or_transformers():
    code = "import dflop.models.generic.family, sys; print({'torch', 'transformers'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"
