"""The family of types without a file, held against the families that have one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflop.config import load_model
from dflop.cost.activations import layer_bytes_per_token
from dflop.errors import ConfigError
from dflop.models import load_family
from dflop.models.generic import facts
from dflop.models.generic.facts import facts_key, facts_of, model_key
from dflop.models.media import MediaHeader, Placement
from dflop.models.weights import hf_types
from dflop.records import ModuleSpec, from_dict
from tests.models.generic.configs import config_of
from tests.models.generic.test_media_check import MODELS, OF_FAMILY, write_processor

SIZES = {
    "image": [(224, 224, 1, 0.0), (640, 480, 1, 0.0), (1000, 60, 1, 0.0), (31, 75, 1, 0.0)],
    "video": [(320, 240, 40, 20.0), (64, 64, 7, 3.5)],
    "audio": [(0, 0, 0, 0.6), (0, 0, 0, 7.3), (0, 0, 0, 31.0)],
}
"""Width, height, frames and seconds of items."""
LARGE = {
    "image": [(1400, 1000, 1, 0.0), (4000, 60, 1, 0.0)], "video": [(900, 700, 8, 4.0)], "audio": [],
}  # fmt: skip
ALIKE = ("num_params", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "is_gated_mlp", "num_used_params")
OF_MODULE = (
    "module", "num_layers", "hidden_size", "num_params", "num_edge_params", "max_pp", "num_entry_layers", "vocab_size",
    "is_tied", "num_deep_params", "deep_layers", "num_projector_matrix_params", "tp_choices",
)  # fmt: skip


@pytest.mark.budget(40, "a model of real size on meta and every real call of its processor")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "qwen2_audio"])
def test_what_is_read_of_a_model_equals_its_familys_file(ask_media, tmp_path, name):
    model = load_model(MODELS[OF_FAMILY[name]])
    family = load_family(model.family, model.hf_config, model.media)
    write_processor(family, tmp_path)
    config = hf_types(family, model.hf_config)[0].to_dict()
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    config |= family.token_ids(defaultdict(int, ids))
    items = [[kind, *size] for kind in family.media_tokens for size in SIZES[kind]]
    large = [[kind, *size] for kind in family.media_tokens for size in LARGE[kind]]
    given = {
        "folder": str(tmp_path), "config": json.loads(json.dumps(config, default=str)), "items": items, "large": large,
        "levels": [0, 2, 5, 8],
    }  # fmt: skip
    said = ask_media(given)
    assert said["media"] == dict.fromkeys(family.media_tokens, "")
    for own, read in zip(family.specs(), (from_dict(ModuleSpec, spec) for spec in said["specs"]), strict=True):
        assert {key: getattr(read, key) for key in OF_MODULE} == {key: getattr(own, key) for key in OF_MODULE}
        (mine,), (theirs,) = own.kinds, read.kinds
        assert {key: getattr(theirs, key) for key in ALIKE} == {key: getattr(mine, key) for key in ALIKE}
        assert layer_bytes_per_token(read) == pytest.approx(layer_bytes_per_token(own), rel=0.03)
        assert read.num_input_values == pytest.approx(own.num_input_values, rel=0.03)
    for item, placed in zip(items, said["placed"], strict=True):
        mine = family.place(MediaHeader(*item))
        assert (placed["num_tokens"], placed["num_rows"]) == (mine.num_tokens, mine.num_rows), item
        if name != "qwen2_audio":  # whose file cuts a sound's padding off, which transformers masks
            assert placed["sum_sq_tokens"] == mine.sum_sq_tokens, item
    for item, tokens in zip(large, said["shrunk"], strict=True):
        if name == "qwen2_5_vl" and item != large[1]:  # a thin strip, and frames that become tiles, keep their size
            assert tokens == sorted(tokens, reverse=True), item
            assert tokens[2] < tokens[0] / 4, item


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


def test_facts_are_of_a_version_of_transformers_and_a_models_key_is_of_any(tmp_path, monkeypatch):
    config = config_of("qwen3_5").to_dict()
    before = facts_key(config, tmp_path), model_key(config, tmp_path)
    monkeypatch.setattr(facts, "version", lambda library: "5.99")
    assert facts_key(config, tmp_path) != before[0]
    assert model_key(config, tmp_path) == before[1]
    assert model_key(config | {"image_token_id": 7}, tmp_path) != before[1]


def test_what_was_read_once_is_kept_and_a_damaged_file_is_read_again(tmp_path, monkeypatch):
    from dflop.models.generic import read_facts

    structure = read_facts.structure_of(config_of("gemma3"), "")
    calls = []

    def read(key, hf_config, folder):
        calls.append(key)
        return facts.ModelFacts(key, structure, (facts.Medium("video", "no frames"),))

    monkeypatch.setattr(read_facts, "read_facts", read)
    config, cache = config_of("gemma3").to_dict(), tmp_path / "cache"
    found = facts_of(config, tmp_path, cache)
    facts._facts.cache_clear()
    assert facts_of(config, tmp_path, cache) == found
    (kept,) = cache.glob("*.json")
    kept.write_text("{")
    facts._facts.cache_clear()
    assert facts_of(config, tmp_path, cache) == found
    assert calls == [found.key] * 2


def test_a_medium_that_a_model_does_not_take_is_refused_with_the_reason(tmp_path, monkeypatch):
    from dflop.models.generic import family, read_facts

    found = facts.ModelFacts(
        "", read_facts.structure_of(config_of("gemma3"), ""), (facts.Medium("video", "no frames"),)
    )
    monkeypatch.setattr(family, "facts_of", lambda *_: found)
    rules = load_family("generic", config_of("gemma3").to_dict(), {}, tmp_path)
    for kind, said in (
        ("video", "gemma3 does not support video: no frames"),
        ("audio", r"audio \(supported: text only"),
    ):
        with pytest.raises(ValueError, match=said):
            rules.place(MediaHeader(kind, 100, 100, 8, 1.0))


@pytest.mark.parametrize(
    ("num_tokens", "why"), [(4, ""), (9, "puts 9 tokens `<image>` into a text where the model makes 4 rows")]
)
def test_a_processor_that_counts_otherwise_than_the_model_is_told(num_tokens, why, tmp_path, monkeypatch):
    from dflop.models.generic import read_facts

    tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(("?", "<image>", "<boi>", "<eoi>"))}, "?"))
    names = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="?", extra_special_tokens=names)
    pictures = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = transformers.Gemma3Processor(pictures, tokenizer, image_seq_length=num_tokens)
    monkeypatch.setattr(read_facts, "load_processor", lambda folder: processor)
    monkeypatch.setattr(read_facts, "refuse_missing_files", lambda folder: None)
    (pictures,) = read_facts.read_facts("", config_of("gemma3").to_dict(), tmp_path).media
    assert (pictures.problem, bool(pictures.form)) == ("", not why)
    assert why in pictures.untrained


def test_facts_and_kept_checks_are_read_without_torch_or_transformers():
    modules = "dflop.models.generic.family, dflop.models.generic.exactness"
    code = f"import {modules}, sys; print({{'torch', 'transformers'}} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"


def test_attention_of_windows_is_averaged_over_layers_by_their_queries():
    from dflop.models.generic.structure import read_structure

    structure = read_structure(config_of("gemma3"))  # three layers with a window of 8, one without
    windowed = 2 * sum(min(i, 8) for i in range(1, 101)) - 100
    assert structure.sum_sq_tokens(100) == round((3 * windowed + 100**2) / 4)
    assert structure.sum_sq_tokens(8) == 0
    assert read_structure(config_of("qwen3_5")).sum_sq_tokens(100) == 0  # full attention, or none over pairs


def test_sizes_that_were_placed_are_remembered_and_a_torn_line_is_placed_again(tmp_path, monkeypatch):
    from dflop.models.generic.placing import Placer
    from dflop.models.generic.structure import read_structure

    known = facts.ModelFacts("key", read_structure(config_of("gemma3")), ())
    placed = []

    def place(placer, header):
        placed.append(header.width_px)
        return "too wide" if header.width_px > 9 else Placement("vision", (1, 4, 1), 4, 16, 1, ("<a>", 1))

    monkeypatch.setattr(Placer, "_placed", place)
    small, wide = (MediaHeader("image", width, 5, 1, 0.0) for width in (5, 10))
    for _ in range(2):
        placer = Placer(known, {}, tmp_path, tmp_path)
        assert placer.place(small).layout == ("<a>", 1)
        with pytest.raises(ValueError, match="too wide"):
            placer.place(wide)
    assert placed == [5, 10]
    (file,) = (tmp_path / "key.sizes").glob("*.jsonl")
    file.write_text(file.read_text()[:-9])
    with pytest.raises(ValueError, match="too wide"):
        Placer(known, {}, tmp_path, tmp_path).place(wide)
    assert placed == [5, 10, 10]
