"""The profiler on a real device: CUDA timings in bf16 fit a cost table, and what does not fit is a row."""

from __future__ import annotations

import pytest
import torch

from dflop.cost.fit import fit_cost_tables
from dflop.models.ways import TRAIN, WAYS
from dflop.profile.groups import make_group
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.profile.profiler import profile_model
from dflop.profile.timing import time_phases
from dflop.records import LLM
from tests.profile.measuring import measure
from tests.train import synthetic

MODULES = ("vision", "audio", LLM)


def settings():
    return ProbeSettings("gpu", hardware_name("cuda"), software_name(), "bfloat16", num_repeats=3)


def new_probe(cuda, module, num_layers=1, way=TRAIN):
    family = synthetic.family()
    token_ids = family.token_ids(synthetic.TOKEN_IDS)
    return ModuleProbe(family, token_ids, module, num_layers, settings(), cuda, way=way)


def group_of(module, num_samples=4):
    users = [s for s in synthetic.make_shapes(60, seed=0) if s.load(module).num_tokens]
    return make_group("random", users[:num_samples], module)


def test_every_module_gets_a_cost_table(cuda):
    family = synthetic.family()
    measurements = list(
        profile_model(
            family,
            synthetic.make_shapes(60, seed=0),
            token_config=family.token_ids(synthetic.TOKEN_IDS),
            settings=settings(),
            depths=(1, 2),
            num_probes=12,
            max_samples=12,
            budget_s=30,
            device=cuda,
            progress=print,
        )
    )
    tables = fit_cost_tables(measurements, family.specs())
    assert {t.module for t in tables} == set(MODULES)
    assert all(m.forward_s > 0 and m.backward_s > 0 and m.optimizer_s > 0 for m in measurements)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("way", WAYS.values(), ids=lambda w: w.name)
def test_peak_holds_weights_gradients_and_activations(cuda, module, way):
    m = measure(new_probe(cuda, module, 2, way), group_of(module))
    gradient_bytes = 0 if way.is_frozen else m.param_bytes
    assert m.status == "ok"
    assert m.peak_bytes >= m.param_bytes + gradient_bytes + m.activation_bytes
    assert (m.backward_s == 0) == (way.is_frozen and module != LLM)


def test_events_see_kernels_and_not_only_their_launch(cuda):
    x = torch.randn(8192, 8192, device=cuda)

    def matmuls(count):
        return lambda: [x @ x for _ in range(count)][-1]

    time_phases(matmuls(1), lambda _: None, cuda)
    one, many = (time_phases(matmuls(n), lambda _: None, cuda)[0] for n in (1, 20))
    assert 10 * one < many < 40 * one


def test_a_group_that_does_not_fit_is_a_row(cuda):
    probe, group = new_probe(cuda, LLM), group_of(LLM)
    before = measure(probe, group)
    forward = probe._stage.forward

    def too_large(*args):
        torch.empty(1 << 50, dtype=torch.uint8, device=cuda)

    probe._stage.forward = too_large
    row = measure(probe, group)
    assert (row.status, row.forward_s, row.num_tokens) == ("oom", 0.0, group.load.num_tokens)
    probe._stage.forward = forward
    after = measure(probe, group)
    assert (after.status, after.activation_bytes) == ("ok", before.activation_bytes)
