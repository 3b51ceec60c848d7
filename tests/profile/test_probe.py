from __future__ import annotations

from functools import cache

import pytest
import torch

from dflop.cost.fit import fit_cost_tables
from dflop.errors import DataError
from dflop.models.ways import TRAIN, WAYS
from dflop.profile.groups import POOL_FACTOR, drawn_groups, make_group, probe_groups
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.profile.profiler import profile_model
from dflop.profile.sweeps import MIN_GROUPS
from dflop.records import LLM
from tests.profile.measuring import measure
from tests.train.synthetic import TOKEN_IDS, family, make_shapes

SETTINGS = ProbeSettings("key", "cpu: test", "torch test", "float32", num_repeats=2)
MODULES = ("vision", "audio", LLM)


@cache
def probe(module, num_layers, way=TRAIN):
    return new_probe(module, num_layers, way)


def new_probe(module, num_layers, way=TRAIN, model=None, group=None):
    model, cpu = model or family(), torch.device("cpu")
    ids = model.token_ids(TOKEN_IDS)
    return ModuleProbe(model, ids, module, num_layers, SETTINGS, cpu, way=way, group=group)


def users(module, count):
    return [s for s in make_shapes(60, seed=0) if s.load(module).num_tokens][:count]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_measurement_describes_what_was_run(module, num_layers):
    group = make_group("random", users(module, 3), module)
    m = measure(probe(module, num_layers), group)
    assert (m.profile_key, m.hardware, m.software, m.dtype) == ("key", "cpu: test", "torch test", "float32")
    assert (m.module, m.num_layers, m.tp, m.group, m.num_repeats) == (module, num_layers, 1, "random", 2)
    assert (m.num_items, m.num_tokens) == (group.load.num_items, group.load.num_tokens)
    assert min(m.forward_s, m.backward_s, m.activation_bytes) > 0
    assert min(m.forward_spread_s, m.backward_spread_s) >= 0
    spec = next(s for s in family().specs() if s.module == module)
    assert m.param_bytes == 4 * (num_layers * spec.kinds[0].num_params + spec.num_edge_params)


def test_squares_are_those_of_the_shallow_tower_that_was_timed():
    sample = next(s for s in make_shapes(60, seed=0) if any(i.grid[1] > 8 or i.grid[2] > 8 for i in s.items))
    group = make_group("single", [sample], "vision")
    one, two = (measure(probe("vision", n), group) for n in (1, 2))
    assert one.sum_sq_tokens == sum(i.grid[0] * (i.grid[1] * i.grid[2]) ** 2 for i in group.items), "full attention"
    assert two.sum_sq_tokens == group.load.sum_sq_tokens, "one windowed layer, one full, as in the model"
    assert two.sum_sq_tokens < one.sum_sq_tokens


@pytest.mark.parametrize("module", ["audio", LLM])
def test_activation_bytes_grow_alike_with_every_layer_and_double_with_the_samples(module):
    group = make_group("random", users(module, 3), module)
    one, two, three = (measure(probe(module, n), group).activation_bytes for n in (1, 2, 3))
    assert two > one
    assert three - two == two - one
    sample = users(module, 1)
    once = measure(probe(module, 2), make_group("single", sample, module))
    twice = measure(probe(module, 2), make_group("random", sample * 2, module))
    assert twice.num_tokens == 2 * once.num_tokens
    assert twice.activation_bytes == pytest.approx(2 * once.activation_bytes, rel=0.01)


def profile(shapes, model=None, **changes):
    model, lines = model or family(), []
    options = dict(
        token_config=model.token_ids(TOKEN_IDS),
        settings=SETTINGS,
        depths=(1, 2),
        num_probes=MIN_GROUPS + 2,
        max_samples=2,
        budget_s=1e9,
        device=torch.device("cpu"),
        progress=lines.append,
    )
    return list(profile_model(model, shapes, **options | changes)), lines


def test_every_used_module_is_profiled_at_every_depth():
    shapes = make_shapes(30, seed=1, kinds=("image",))
    found, lines = profile(shapes, num_probes=4)
    assert [(m.module, m.num_layers) for m in found] == [
        (m, d) for m in ("vision", LLM) for _ in "1234" for d in (1, 2)
    ]
    groups = probe_groups(shapes, LLM, num_groups=4, max_samples=2, seed=SETTINGS.seed)
    assert [m.num_tokens for m in found if m.module == LLM] == [g.load.num_tokens for g in groups for _ in "12"]
    assert lines[0] == "vision: 8 probes"


def test_every_way_of_running_is_profiled():
    ways, spent = (TRAIN, WAYS["recompute"]), []
    shapes = make_shapes(10, seed=1, kinds=("audio",))[4:5]
    found, lines = profile(shapes, num_probes=1, ways=ways, budget_s=1e4, at=lambda _, *at: spent.append(at))
    assert spent[0] == (0, 10000)
    assert spent == sorted(spent), "of both ways together"
    assert (5000, 10000) in spent
    assert [m.recompute for m in found] == [False, False, True, True]
    assert [line.partition(":")[0] for line in lines] == ["llm", "llm, recompute"]


def test_chosen_groups_are_within_the_limits_and_fit_cost_tables():
    shapes = make_shapes(60, seed=2)
    found, _ = profile(shapes, num_probes=8, max_samples=4)
    for module in family().modules:
        rows = [m for m in found if m.module == module]
        assert len(rows) == 16
        assert len({(m.num_tokens, m.num_items, m.sum_sq_tokens, m.num_layers) for m in rows}) > 8
        pool = drawn_groups(shapes, module, num_groups=POOL_FACTOR * 8, max_samples=4, seed=SETTINGS.seed)
        assert {m.num_tokens for m in rows} <= {g.load.num_tokens for g in pool}
        sizes = {m.num_tokens for m in rows}
        assert {min(g.load.num_tokens for g in pool), max(g.load.num_tokens for g in pool)} <= sizes
    tables = fit_cost_tables(found, family().specs())
    assert {t.module for t in tables} == set(family().modules)


def test_probing_ends_when_the_time_is_spent_but_a_fit_has_its_number():
    found, lines = profile(make_shapes(60, seed=2), num_probes=9, only=LLM, budget_s=0)
    assert [(m.module, m.num_layers) for m in found] == [(LLM, n) for _ in range(MIN_GROUPS) for n in (1, 2)]
    assert lines[0].startswith(f"llm: {2 * MIN_GROUPS} probes")


def test_an_empty_dataset_is_an_error_of_the_data():
    with pytest.raises(DataError, match="no sample"):
        profile([])
