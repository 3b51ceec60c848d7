"""Probes and memory forecasts run every module of every family, whatever it takes and gives."""

from __future__ import annotations

import pytest
import torch

from dflop.profile.groups import make_group
from dflop.profile.memory import fake_stage
from dflop.profile.probe import ModuleProbe, ProbeSettings
from tests.models.tiny_families import CASES, VOCAB
from tests.train.test_parity_families import CaseSource

SETTINGS = ProbeSettings("key", "cpu: test", "torch test", "float32", num_repeats=1)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_module_is_probed_at_its_own_sizes(case, num_layers):
    source, ids = CaseSource(case), case.family.token_ids(case.token_id)
    shapes = [source.shape(n) for n in range(len(case.samples))]
    for spec in case.family.specs():
        group = make_group("random", [s for s in shapes if s.load(spec.module).num_tokens], spec.module)
        probe = ModuleProbe(case.family, ids, VOCAB, spec.module, num_layers, SETTINGS, torch.device("cpu"))
        measured = probe.measure(group)
        assert measured.status == "ok"
        assert (measured.num_items, measured.num_tokens) == (group.load.num_items, group.load.num_tokens)
        assert measured.param_bytes == 4 * (num_layers * spec.num_layer_params + spec.num_edge_params)
        assert min(measured.forward_s, measured.backward_s, measured.activation_bytes) > 0
        forecast = fake_stage(case.family, ids, VOCAB, spec.module, num_layers, dtype="float32")(group)
        assert forecast.activation_bytes == measured.activation_bytes
        assert forecast.param_bytes == measured.param_bytes
