"""FLOPs of a batch against torch's own counter, which watches layers of real size run on the meta device."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflop.cost.flops import FlopCounter, peak_flops_per_s
from dflop.models import counts
from dflop.records import LLM, LayerKind, ModuleSpec
from tests.builders import make_sample

NUM_TOKENS, VOCAB = 512, 152064
TEXT = counts.DEFAULTS["qwen2"] | {
    "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 4, "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip
VIT = counts.DEFAULTS["siglip_vision_model"] | {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 8, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
TEXT_SPEC = counts.decoder(TEXT, tied=False)
VIT_SPEC = counts.siglip(VIT, (0, 0))


def counted_llm(is_frozen: bool, num_loss_tokens: int) -> int:
    """FLOPs of Hugging Face's model; its attention computes every score, masked or not."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # seconds of every collection

    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**TEXT), attn_implementation="eager")
        model.requires_grad_(not is_frozen)
        embedded = torch.zeros(1, NUM_TOKENS, TEXT["hidden_size"], requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            kept = slice(0, num_loss_tokens)
            model.lm_head(model.model(inputs_embeds=embedded).last_hidden_state[:, kept]).sum().backward()
    return counter.get_total_flops()


def masked_flops() -> float:
    """Half of all scores, forward and backward: those that a causal mask lets nobody see."""
    return 3 * TEXT["num_hidden_layers"] * 2.0 * NUM_TOKENS**2 * TEXT["hidden_size"]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_language_model_takes_what_torch_counts(is_frozen):
    counter = FlopCounter([VIT_SPEC, TEXT_SPEC], [LLM] if is_frozen else [])
    found = counter.count([make_sample(0, NUM_TOKENS, num_supervised_tokens=100)])
    assert found == pytest.approx(counted_llm(is_frozen, 100) - masked_flops(), rel=1e-3)


def test_a_base_of_adapters_takes_gradients_of_its_inputs_alone():
    sample, specs = [make_sample(0, NUM_TOKENS, [("vision", 729)])], [VIT_SPEC, TEXT_SPEC]
    below = FlopCounter(specs, [LLM]).count(sample)
    assert FlopCounter(specs, adapted=[LLM]).count(sample) == below
    assert FlopCounter(specs, ["vision"], [LLM]).count(sample) > FlopCounter(specs, ["vision", LLM]).count(sample)


def test_an_encoder_takes_what_torch_counts_but_for_its_edge():
    from transformers import SiglipVisionConfig, SiglipVisionModel

    with torch.device("meta"):
        model = SiglipVisionModel._from_config(SiglipVisionConfig(**VIT), attn_implementation="eager")
        with FlopCounterMode(display=False) as watched:
            model(torch.zeros(2, 3, 384, 384)).last_hidden_state.sum().backward()
    counted = watched.get_total_flops()
    patches = (384 // 14) ** 2
    # An image is a sequence of its own; the sample has no text to count.
    counter = FlopCounter([VIT_SPEC, TEXT_SPEC])
    with_images = counter.count([make_sample(0, 8, [("vision", patches), ("vision", patches)])])
    rows = 2 * (patches // 4)
    found = with_images - counter.count([make_sample(0, 8 + rows)])
    assert counted * 0.98 < found < counted


@pytest.mark.parametrize("name", ["vision", "vision.tower"])
def test_a_frozen_encoder_has_no_backward(name):
    media, specs = [("vision", 729)], [VIT_SPEC, TEXT_SPEC]
    text = FlopCounter(specs).count([make_sample(0, 8 + 729 // 4)])
    found = [FlopCounter(specs, frozen).count([make_sample(0, 8, media)]) - text for frozen in ([], [name])]
    assert found[1] == pytest.approx(found[0] / 3)


def test_samples_add_up():
    tiny = ModuleSpec(LLM, ((LayerKind("attention", 1000, 2, 2, 8, 64, 128), 2),), 16, 10, 2, (1,), vocab_size=7)
    counter = FlopCounter([tiny])
    # Layers: 2 * 1000 per token and 2 * 16 per squared token, twice; head: 2 * 7 * 16 per token that carries loss.
    expected = [3 * (2 * (2000 * n + 32 * n * n) + 224 * 10) for n in (5, 9)]
    samples = [make_sample(0, 5), make_sample(1, 9)]
    assert [counter.count([s]) for s in samples] == expected
    assert counter.count(samples) == sum(expected)


def test_layers_of_two_kinds_take_what_each_takes():
    delta = LayerKind("gated delta", 500, 0, 0, 8, 64, 128)
    experts = LayerKind("attention, 2 of 8 experts", 4000, 2, 2, 8, 64, 128, num_active_params=1300)
    spec = ModuleSpec(LLM, ((delta, 1), (experts, 2), (delta, 2)), 16, 10, 2, (1,))
    assert (spec.num_layers, spec.num_params, spec.kinds) == (5, 3 * 500 + 2 * 4000 + 10, (delta, experts))
    # 2 FLOPs per weight that a token passes, 2 * 16 per squared token in two of the layers.
    expected = 3 * (2 * (3 * 500 + 2 * 1300) * 9 + 2 * 32 * 81)
    assert FlopCounter([spec]).count([make_sample(0, 9)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hardware", "dtype", "peak"),
    [
        ("cuda: NVIDIA H200", "bfloat16", 989.5e12), ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("cuda: NVIDIA H100 80GB HBM3", "float32", math.nan), ("cuda: NVIDIA H100 PCIe", "bfloat16", math.nan),
        ("cuda: NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", math.nan), ("cpu: AMD EPYC 9R14", "bfloat16", math.nan),
    ],
)  # fmt: skip
def test_a_peak_is_what_a_data_sheet_says_or_unknown(hardware, dtype, peak):
    assert peak_flops_per_s(hardware, dtype) == pytest.approx(peak, nan_ok=True)
