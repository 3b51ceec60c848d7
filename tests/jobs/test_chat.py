"""What cannot be asked is said in one sentence; answers themselves: `test_exported_folder.py`."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError
from dflop.jobs.chat import ChatModel, answer, is_model_folder, model_of_folder, model_of_run
from tests.jobs.answering import SUBJECTS, write_tokenizer
from tests.jobs.made import make_run
from tests.models.tiny_families import CASES

CASE = CASES["Qwen2.5-VL"]


class Parrot:
    """A model that says the same, whatever it is asked."""

    dtype = None

    def __init__(self, said):
        self.said, self.given = said, {}

    def to(self, _device):
        return self

    def generate(self, *, input_ids, max_new_tokens, **given):
        self.given = given
        return torch.cat([input_ids, torch.tensor([self.said[:max_new_tokens]])], dim=1)


@pytest.fixture
def asked(tmp_path):
    """(model that says `cat` and ends, a picture)."""
    write_tokenizer(SUBJECTS["Qwen2.5-VL"], tmp_path / "model")
    tokenizer = ChatTokenizer(tmp_path / "model" / "tokenizer.json", CASE.family)
    Image.new("RGB", (56, 84)).save(tmp_path / "a.png")
    words = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in ("c", "a", "t")]
    return ChatModel(CASE.family, tokenizer, Parrot([*words, tokenizer.end_of_answer])), tmp_path / "a.png"


def test_an_answer_ends_where_the_model_ends_it_or_at_the_limit(asked):
    model, picture = asked
    whole = answer(model, "what is <image>?", [picture], max_tokens=9)
    assert sorted(whole.text) == ["a", "c", "t"]
    assert (whole.num_tokens, whole.is_complete) == (4, True)
    assert model.model.given["pixel_values"].shape == (24, 1176)
    cut = answer(model, "what?", [], max_tokens=2)
    assert (cut.num_tokens, cut.is_complete) == (2, False)
    assert "pixel_values" not in model.model.given


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.wav", b"", "qwen2_5_vl takes no audio"),
        ("a.xyz", b"", "`a.xyz` is no image, video or audio file by its extension"),
        ("gone.png", None, "gone.png"),
        ("bad.png", b"no picture", "image"),
    ],
)
def test_media_that_cannot_be_asked_about_are_named(asked, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        answer(asked[0], "what?", [tmp_path / name], max_tokens=2)
    assert name in f"{raised.value}"


def test_a_run_without_a_checkpoint_and_a_folder_without_a_tokenizer_say_so(tmp_path):
    with pytest.raises(ConfigError, match="the run has no checkpoint yet"):
        model_of_run(make_run(tmp_path), print)
    (folder := tmp_path / "model").mkdir()
    assert not is_model_folder(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": CASE.name, **CASE.hf_config}))
    assert is_model_folder(folder)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        model_of_folder(folder)
