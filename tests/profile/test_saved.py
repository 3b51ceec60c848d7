from __future__ import annotations

import pytest
import torch

from dflop.models.ways import Way
from dflop.profile.groups import make_group
from dflop.profile.probe import ModuleProbe
from dflop.profile.saved import saved_bytes
from tests.models.tiny_families import CASES
from tests.profile.measuring import measure
from tests.profile.test_probe import SETTINGS
from tests.train.tiny_subject import CaseSource


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_module_is_probed_at_its_own_sizes(case):
    source, ids = CaseSource(case), case.family.token_ids(case.token_id)
    shapes = [source.shape(n) for n in range(len(case.samples))]
    for spec in case.family.specs():
        group = make_group("random", [s for s in shapes if s.load(spec.module).num_tokens], spec.module)
        probe = ModuleProbe(case.family, ids, spec.module, 2, SETTINGS, torch.device("cpu"))
        measured = measure(probe, group, num_repeats=1)
        assert measured.status == "ok"
        assert (measured.num_items, measured.num_tokens) == (group.load.num_items, group.load.num_tokens)
        assert measured.param_bytes == 4 * (2 * spec.kinds[0].num_params + spec.num_edge_params)
        assert min(measured.forward_s, measured.backward_s, measured.activation_bytes) > 0


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


def test_without_a_backward_pass_to_come_nothing_is_kept():
    case = CASES["Qwen2-VL"]
    source, ids = CaseSource(case), case.family.token_ids(case.token_id)
    group = make_group("random", [source.shape(n) for n in range(len(case.samples))], "vision")
    for is_frozen in (False, True):
        way = Way(is_frozen, recompute=True)
        probe = ModuleProbe(case.family, ids, "vision", 2, SETTINGS, torch.device("cpu"), way=way)
        assert (measure(probe, group, num_repeats=1).activation_bytes == 0) == is_frozen
