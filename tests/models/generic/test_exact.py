import pytest
import torch
import transformers

from dflop.models.generic import entry, exact, stage
from dflop.models.generic.classes import find_decoder
from dflop.models.generic.exact import LIMIT, check_exactness, compare
from dflop.models.generic.stage import Pattern, UnknownArgument
from dflop.models.generic.structure import read_structure
from tests.models.generic.configs import PARTS, TEXT, config_of


@pytest.fixture
def small_model():
    stage.register()
    return lambda kind: exact._random_model(config_of(kind))


@pytest.mark.parametrize("kind", PARTS)
def test_two_packed_steps_in_two_stages_train_as_transformers_does(kind):
    config = config_of(kind)
    found = check_exactness(config, read_structure(config))
    checked = {check.medium: check for check in found.checks if check.errors}
    assert set(checked) == {"text", "image"}
    for check in checked.values():
        assert check.is_exact
        assert check.error <= LIMIT
        assert any(".layers.0." in module for module, _ in check.errors)
        assert any(".layers.3." in module for module, _ in check.errors)
    assert any(module.startswith(("model.visual", "model.vision")) for module, _ in checked["image"].errors)
    assert found.is_exact


def test_any_cut_computes_the_same(small_model):
    """Deep features of Qwen3-VL are added behind layers of either stage."""
    model = small_model("qwen3_vl_moe")
    for middle in (1, 3):
        assert compare(model, "image", middle)[0][1] <= LIMIT


def test_a_state_that_leaks_from_sample_to_sample_is_found(monkeypatch):
    monkeypatch.setattr(stage, "per_sample", lambda forward, packing, *args, **kwargs: forward(*args, **kwargs))
    config = config_of("qwen3_5")
    found = check_exactness(config, read_structure(config))
    text = found.checks[0]
    assert not found.is_exact
    assert text.error > 0.01
    assert text.float64_error > 0.01
    assert ".layers.0." in text.errors[0][0] or "linear_attn" in "".join(module for module, _ in text.errors[:5])


def test_a_window_that_is_lost_is_found(monkeypatch):
    monkeypatch.setattr(stage, "_seen", lambda module, mask, packing, index: None)
    monkeypatch.setattr(stage, "_band", lambda length, window: torch.ones(length, length, dtype=torch.bool).tril())
    real = stage.packed_attention
    monkeypatch.setattr(stage, "packed_attention", lambda *a, **k: real(*a, **{**k, "sliding_window": None}))
    config = config_of("gemma3")
    assert check_exactness(config, read_structure(config)).checks[0].float64_error > 0.01


def test_attention_arguments_that_would_be_ignored_are_refused_by_name(small_model):
    model = small_model("smolvlm")
    layer = find_decoder(stage.Stage(model, 0, 2).model)[1].layers[0].self_attn
    query = torch.zeros(1, 4, 3, 16)
    with pytest.raises(UnknownArgument, match="LlamaAttention takes position_bias"):
        stage._attention(layer, query, query, query, position_bias=torch.zeros(1), softcap=None)


def test_inputs_of_the_decoder_that_stages_do_not_know_are_refused_by_name(small_model, monkeypatch):
    monkeypatch.setattr(entry, "_HANDED_ON", ())
    with pytest.raises(UnknownArgument, match="deepstack_visual_embeds, visual_pos_masks"):
        compare(small_model("qwen3_vl_moe"), "image")


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
    out = stage.masked_attention(q, k, v, seen, 0.3, softcap, sinks)
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
    out, rest = stage.per_sample(part, [3, 4], hidden, "cache", rotary=rotary)
    assert calls == [(3, "cache", [3, 3], None), (4, "cache", [4, 4], None)]
    assert rest == "weights"
    torch.testing.assert_close(out, hidden * 2)


def test_layers_that_use_keys_of_others_stay_in_their_stage(small_model):
    """Gemma 4's last layers; exact as long as a cut leaves them with the layers whose keys they use."""
    text = TEXT | {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160,
        "global_head_dim": 32, "num_global_key_value_heads": 1,
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING["gemma4"].from_dict({"model_type": "gemma4", "text_config": text})
    structure = read_structure(config)
    assert [kind.layers for kind in structure.kinds] == [(0, 2), (1, 3), (4,), (5,)]
    check = check_exactness(config, structure).checks[0]
    assert check.is_exact
    model = exact._random_model(config)
    assert stage.last_cut(find_decoder(model)[1]) == 2
    with pytest.raises(UnknownArgument, match="`num_kv_shared_layers`: behind layer 2"):
        compare(model, middle=3)


def test_a_mask_is_kept_whole_or_refused():
    pattern = Pattern(lambda b, h, q, k: k <= q)
    assert pattern[:, :, 0:, :] is pattern
    assert pattern(torch.arange(3)).tolist() == torch.ones(3, 3, dtype=torch.bool).tril().tolist()
    with pytest.raises(UnknownArgument, match="part of the attention mask"):
        pattern[:, :, 1:, :]
