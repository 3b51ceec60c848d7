from __future__ import annotations

import dataclasses

import pytest
import torch

from dflop.cost.activations import layer_bytes_per_token
from dflop.models import load_family
from dflop.models.ways import TRAIN, WAYS
from dflop.profile.fake_memory import fake_stage
from dflop.profile.groups import make_group
from dflop.profile.probe import ModuleProbe
from dflop.profile.saved import saved_bytes
from dflop.records import LLM
from tests.models.tiny_families import CASES, VOCAB
from tests.profile.test_probe import MODULES, SETTINGS, probe, users
from tests.train.synthetic import TOKEN_IDS, VOCAB_SIZE, family
from tests.train.test_parity_families import CaseSource

ONE_REPEAT = dataclasses.replace(SETTINGS, num_repeats=1)


def counted(module, num_layers, group, *, model=None, vocab_size=VOCAB_SIZE, dtype="float32", way=TRAIN):
    model = model or family()
    return fake_stage(model, model.token_ids(TOKEN_IDS), vocab_size, module, num_layers, dtype=dtype, way=way)(group)


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda w: w.name)
@pytest.mark.parametrize("module", MODULES)
def test_without_data_as_with_data(module, way):
    group = make_group("random", users(module, 3), module)
    for num_layers in (1, 2):
        real, fake = probe(module, num_layers, way).measure(group), counted(module, num_layers, group, way=way)
        for name in ("num_items", "num_tokens", "sum_sq_tokens", "param_bytes", "activation_bytes"):
            assert getattr(fake, name) == getattr(real, name), name
        trained = 0 if way.is_frozen else real.param_bytes
        assert (fake.gradient_bytes, fake.optimizer_bytes) == (trained, 2 * trained)


def test_qwen2_5_7b_at_full_depth_is_what_two_shallow_depths_say():
    """The thinker's decoder has the sizes of Qwen2.5-7B."""
    omni = load_family("qwen2_5_omni_thinker", {}, {})
    sample = dataclasses.replace(users(LLM, 1)[0], items=(), num_llm_tokens=2048, num_supervised_tokens=500)
    group = make_group("random", [sample] * 2, LLM)
    one, two, full = (counted(LLM, n, group, model=omni, vocab_size=152064, dtype="bfloat16") for n in (1, 2, 28))
    spec = next(s for s in omni.specs() if s.module == LLM)
    assert full.param_bytes == 2 * (28 * spec.num_layer_params + spec.num_edge_params)
    per_layer = two.activation_bytes - one.activation_bytes
    assert full.activation_bytes == pytest.approx(one.activation_bytes + 27 * per_layer, rel=0.01)
    joined = 2 * spec.query_width  # of attention's results, a call each on the CPU
    assert per_layer == pytest.approx((sum(layer_bytes_per_token(spec)) + joined) * group.load.num_tokens, rel=0.01)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_module_is_probed_at_its_own_sizes(case):
    source, ids = CaseSource(case), case.family.token_ids(case.token_id)
    shapes = [source.shape(n) for n in range(len(case.samples))]
    for spec in case.family.specs():
        group = make_group("random", [s for s in shapes if s.load(spec.module).num_tokens], spec.module)
        measured = ModuleProbe(case.family, ids, VOCAB, spec.module, 2, ONE_REPEAT, torch.device("cpu")).measure(group)
        assert measured.status == "ok"
        assert (measured.num_items, measured.num_tokens) == (group.load.num_items, group.load.num_tokens)
        assert measured.param_bytes == 4 * (2 * spec.num_layer_params + spec.num_edge_params)
        assert min(measured.forward_s, measured.backward_s, measured.activation_bytes) > 0
        forecast = fake_stage(case.family, ids, VOCAB, spec.module, 2, dtype="float32")(group)
        assert forecast.activation_bytes == measured.activation_bytes
        assert forecast.param_bytes == measured.param_bytes


def test_activation_bytes_are_what_autograd_saves_once_per_storage():
    weight = torch.nn.Parameter(torch.randn(8, 4))
    own = torch.nn.Parameter(torch.randn(4, 8))
    x = torch.randn(3, 4, requires_grad=True)

    def forward():
        hidden = x @ weight.t() + x @ own  # saves x and both weights, of which `own` does not count
        return (hidden * hidden.view(3, 8)).sum()  # saves hidden twice: one storage

    num_bytes, output = saved_bytes(forward, [own])
    assert num_bytes == 4 * (3 * 4 + 8 * 4 + 3 * 8)
    output.backward()
    assert weight.grad is not None


def test_a_view_keeps_all_of_its_storage():
    x, part = torch.randn(100, requires_grad=True), torch.randn(1000)[:100]
    assert saved_bytes(lambda: (x * part).sum(), [])[0] == 4 * 1000
