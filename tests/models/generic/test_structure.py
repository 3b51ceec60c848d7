import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dflop import resources
from dflop.config import load_model
from dflop.models import load_family
from dflop.models.fusing import fuse
from dflop.models.generic import structure, watch
from dflop.models.generic.classes import build, find_decoder
from dflop.models.generic.structure import read_structure
from dflop.models.generic.values import AttentionCall
from tests.models.generic.configs import PARTS, config_of

KINDS = {
    "qwen3_5": [("gated delta", 3), ("full attention", 1)],
    "qwen3_vl_moe": [("full attention, 2 of 4 experts", 4)],
    "gemma3": [("sliding attention", 3), ("full attention", 1)],
    "smolvlm": [("full attention", 4)],
    "mistral3": [("full attention", 4)],
}


@pytest.mark.parametrize("kind", PARTS)
def test_kinds_of_layers_and_every_parameter_are_found(kind):
    found = read_structure(config_of(kind))
    assert [(k.name, len(k.layers)) for k in found.kinds] == KINDS[kind]
    model = transformers.AutoModelForImageTextToText.from_config(config_of(kind))
    decoder = model.get_decoder()
    assert found.num_counted_params == found.num_params == sum(p.numel() for p in model.parameters())
    for of in found.kinds:
        for layer in of.layers:
            assert of.num_params == sum(p.numel() for p in decoder.layers[layer].parameters())
    (encoder,) = found.encoders
    assert encoder.num_layers == 2
    assert bool(encoder.projector) == (kind in ("gemma3", "smolvlm", "mistral3"))
    assert found.is_tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", sorted(path.stem for path in (resources.path("configs") / "models").glob("*.yaml")))
def test_a_familys_own_counts_are_those_read_from_its_classes(name):
    model = load_model(resources.path("configs") / "models" / f"{name}.yaml")
    family = load_family(model.family, model.hf_config, model.media)
    found = read_structure(transformers.CONFIG_MAPPING[model.family](**model.hf_config))
    *_, llm = family.specs()
    assert found.num_params == sum(s.num_params for s in family.specs())
    assert found.num_layers == llm.num_layers
    assert {kind.num_params for kind in found.kinds} == {kind.num_params for kind in llm.kinds}


def test_flops_are_those_of_torchs_counter_over_a_real_layer():
    """Products of the layer's matrices and of attention, counted on the CPU with transformers' own attention."""
    found = read_structure(config_of("smolvlm")).kinds[0]
    decoder = find_decoder(build(config_of("smolvlm"), device="cpu", attention="eager"))[1]
    decoder.layers = decoder.layers[:1]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(inputs_embeds=torch.zeros(1, 48, 64, dtype=torch.bfloat16), use_cache=False)
    square = found.attention[0].flops_per_pair * 48**2  # eager attention computes what the mask then hides
    rotary = counter.flop_counts["Global"][torch.ops.aten.bmm] - square
    assert 0 <= rotary < square / 10
    assert counter.get_total_flops() - square - rotary == found.flops_per_token * 48


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "qwen3_vl_moe"])
def test_bytes_on_the_meta_device_are_those_of_real_tensors(kind):
    """The same layers on the CPU, whose storages exist."""
    watch.register()
    model = build(config_of(kind), device="cpu", attention=watch.NAME, experts=watch.NAME)
    fuse(model)
    _, decoder = find_decoder(model)
    for of in read_structure(config_of(kind)).kinds:
        for length in (40, 96):
            trace = structure._run(decoder, of.layers[0], length)
            assert trace.kept_bytes == pytest.approx(of.kept_bytes_per_token * length + of.kept_bytes, rel=0.03)


def test_active_parameters_are_those_of_the_experts_that_a_token_meets():
    of = read_structure(config_of("qwen3_vl_moe")).kinds[0]
    assert of.num_params - of.num_active_params == 2 * 3 * 64 * 32


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (5, 0), (40, 0), (0, 7)])
def test_pairs_are_those_of_the_mask(window, chunk):
    call = AttentionCall(4, 2, 16, 8, window=window, chunk=chunk)
    query, key = torch.arange(23)[:, None], torch.arange(23)[None]
    seen = (
        (key <= query)
        & ((query - key < window) if window else True)
        & ((query // chunk == key // chunk) if chunk else True)
    )
    assert call.num_pairs(23) == seen.sum()
    assert call.flops_per_pair == 2 * 4 * (16 + 8)


def test_degrees_divide_heads_and_what_the_class_cuts():
    assert read_structure(config_of("mistral3")).degrees == (1, 2)  # two heads of keys
    assert read_structure(config_of("qwen3_5")).degrees == (1, 2)
