"""Files of a processor that are made from media limits say these limits, and what the family does, when read."""

from __future__ import annotations

import json

import pytest

from dflop.models.processor_files import processor_config, tokenizer_config
from dflop.models.processor_settings import read_settings
from tests.models.tiny_families import CASES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_limits_that_are_written_are_read_again(case, tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps(processor_config(case.family)))
    settings = read_settings(tmp_path, case.family)
    told = {limit for of_kind in case.family.settings.values() for limit in of_kind.values()}
    assert settings.media == {key: value for key, value in case.family.media.items() if key in told}
    assert settings.not_followed == ()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_tokenizer_is_told_every_token_of_media_that_is_no_frame_around_others(case):
    named = tokenizer_config(case.family, "<|im_end|>")
    assert named["eos_token"] == "<|im_end|>"
    pads = {tokens.placeholder or tokens.pad for tokens in case.family.media_tokens.values()}
    assert pads <= set(named["extra_special_tokens"].values())
    assert "eos_token" not in tokenizer_config(case.family, "")
