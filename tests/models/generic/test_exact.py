from types import SimpleNamespace

import pytest
import torch
import transformers

from dflop.errors import ConfigError
from dflop.models.build import cut_stage
from dflop.models.generic import exact, llm_stage, packed
from dflop.models.generic.classes import find_decoder
from dflop.models.generic.exact import check_exactness, compare
from dflop.models.generic.exactness import LIMIT
from dflop.models.generic.llm_stage import LlmStage
from dflop.models.generic.reach import Pattern, UnknownArgument
from dflop.models.generic.stage_rules import last_cut
from dflop.models.generic.structure import read_structure
from dflop.records import LLM
from tests.bench.model_configs import config_of as default_config
from tests.models.generic.configs import PARTS, TEXT, config_of
from tests.models.generic.small import Small


@pytest.fixture
def small_model():
    return lambda kind: exact._random_model(config_of(kind))


@pytest.mark.parametrize("kind", PARTS)
def test_two_packed_steps_in_two_stages_train_as_transformers_does(kind):
    config = config_of(kind)
    found = check_exactness(config, read_structure(config))
    checked = {check.medium: check for check in found.checks if check.errors}
    assert set(checked) == {"text", "image"} | ({"video"} if kind.startswith("qwen") else set())
    for check in checked.values():
        assert check.is_exact
        assert check.error <= LIMIT
        assert any(".layers.0." in module for module, _ in check.errors)
        assert any(".layers.3." in module for module, _ in check.errors)
    assert any(module.startswith(("model.visual", "model.vision")) for module, _ in checked["image"].errors)
    assert found.is_exact


ITEMS = [
    ("glmasr", "audio"), ("qwen2_5_omni_thinker", "audio"), ("lfm2_vl", "image"), ("llava_onevision", "video"),
    ("glm46v", "video"), ("ernie4_5_vl_moe", "video"), ("gemma4", "video"), ("gemma4", "audio"), ("aria", "image"),
    ("granite_docling", "image"), ("deepseek_vl_hybrid", "image"), ("llama4", "image"), ("voxtral", "audio"),
    ("llava_next_video", "video"), ("video_llava", "video"), ("step3p7", "image"), ("mistral4", "image"),
]  # fmt: skip
"""Of towers that take one item at a time, or take clips in another way than pictures; of decoders with an experts' loop
of their own, or where both parts of a latent head count as one."""


@pytest.mark.parametrize(("kind", "medium"), ITEMS)
def test_items_of_towers_with_rules_of_their_own_train_as_transformers_does(kind, medium):
    config = default_config(kind)
    model, _ = exact.small_model(config, read_structure(config))
    check = exact._checked(model, medium)
    assert (check.problem, check.is_exact) == ("", True)


def test_seconds_of_clips_that_are_lost_are_found(monkeypatch):
    model, _ = exact.small_model(config := default_config("qwen2_5_vl"), read_structure(config))
    monkeypatch.setattr(llm_stage, "_SECONDS", ())
    assert compare(model, "video")[0][1] > 0.01


def test_any_cut_that_training_may_make_computes_the_same(small_model):
    """Deep features of Qwen3-VL are added behind the first two layers."""
    model = small_model("qwen3_vl_moe")
    for middle in (2, 3):
        assert compare(model, "image", middle)[0][1] <= LIMIT
    with pytest.raises(ConfigError, match="after the first 2 decoder layers, the first stage has 1"):
        compare(model, "image", 1)


def test_deep_features_that_are_lost_are_found(small_model, monkeypatch):
    monkeypatch.setattr(LlmStage, "_beside", lambda stage, hidden: {})
    assert compare(small_model("qwen3_vl_moe"), "image")[0][1] > 0.01


def test_a_state_that_leaks_from_sample_to_sample_is_found(monkeypatch):
    monkeypatch.setattr(packed, "per_sample", lambda forward, lengths, *args, **kwargs: forward(*args, **kwargs))
    config = config_of("qwen3_5")
    found = check_exactness(config, read_structure(config))
    text = found.checks[0]
    assert not found.is_exact
    assert text.error > 0.01
    assert text.float64_error > 0.01
    assert ".layers.0." in text.errors[0][0] or "linear_attn" in "".join(module for module, _ in text.errors[:5])


def test_a_window_that_is_lost_is_found(monkeypatch):
    real = packed.packed_attention
    monkeypatch.setattr(packed, "packed_attention", lambda *a, **k: real(*a, **{**k, "sliding_window": None}))
    config = config_of("gemma3")
    assert check_exactness(config, read_structure(config)).checks[0].float64_error > 0.01


def test_attention_arguments_that_would_be_ignored_are_refused_by_name():
    subject = Small("smolvlm")
    layer = cut_stage(subject.build(), subject.family, LLM, (0, 2)).layers[0].self_attn
    query = torch.zeros(1, 4, 3, 16)
    with pytest.raises(UnknownArgument, match="LlamaAttention takes position_bias"):
        packed._attention(layer, query, query, query, position_bias=torch.zeros(1), softcap=None)


def test_a_copy_that_does_not_shrink_is_not_built(monkeypatch):
    monkeypatch.setattr(exact, "MAX_PARAMS", 1000)
    config = config_of("smolvlm")
    found = check_exactness(config, read_structure(config))
    assert not found.is_exact
    assert "a section keeps its sizes" in found.checks[0].problem


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masked_attention_is_softmax_over_what_is_seen_and_a_sink(softcap):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    seen, sinks = torch.ones(5, 5, dtype=torch.bool).tril(), torch.randn(2)
    out = packed.masked_attention(q, k, v, seen, 0.3, softcap, sinks)
    for head in range(2):
        for query in range(5):
            scores = (k[0, head, : query + 1] @ q[0, head, query]) * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
            torch.testing.assert_close(out[0, head, query], weights @ v[0, head, : query + 1])


def test_per_sample_cuts_what_has_an_entry_per_token():
    calls = []

    def part(hidden, cache, *, rotary, mask=None):
        calls.append((hidden.shape[1], cache, [t.shape[1] for t in rotary], mask))
        return hidden * 2, "weights"

    hidden, rotary = torch.arange(7.0).view(1, 7, 1), (torch.zeros(1, 7, 4), torch.zeros(1, 7, 4))
    out, rest = packed.per_sample(part, [3, 4], hidden, "cache", rotary=rotary)
    assert calls == [(3, "cache", [3, 3], None), (4, "cache", [4, 4], None)]
    assert rest == "weights"
    torch.testing.assert_close(out, hidden * 2)


def test_what_layers_share_stays_in_their_stage():
    """Gemma 4's last layers use keys of others, and all take embeddings made of the token ids."""
    types = ["sliding_attention", "full_attention"] * 3
    shared = SimpleNamespace(num_kv_shared_layers=2, layer_types=types)
    assert last_cut(SimpleNamespace(layers=range(6), config=shared)) == 2
    text = TEXT | {
        "num_hidden_layers": 6, "layer_types": types, "sliding_window": 8,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160,
        "global_head_dim": 32, "num_global_key_value_heads": 1,
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING["gemma4"].from_dict({"model_type": "gemma4", "text_config": text})
    structure = read_structure(config)
    assert [kind.layers for kind in structure.kinds] == [(0, 2), (1, 3), (4,), (5,)]
    assert structure.is_whole
    assert check_exactness(config, structure).checks[0].is_exact
    model, _ = exact.small_model(config, structure)
    assert last_cut(find_decoder(model)[1]) == 0
    with pytest.raises(ConfigError, match="layers behind 0 use keys or embeddings of earlier ones"):
        compare(model, middle=3)


def test_a_mask_is_kept_whole_or_refused():
    pattern = Pattern(lambda b, h, q, k: k <= q)
    assert pattern[:, :, 0:, :] is pattern
    assert pattern(torch.arange(3)).tolist() == torch.ones(3, 3, dtype=torch.bool).tril().tolist()
    with pytest.raises(UnknownArgument, match="part of the attention mask"):
        pattern[:, :, 1:, :]
