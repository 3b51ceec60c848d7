from __future__ import annotations

import pytest

from dflop.cost.curve import evaluate
from dflop.models import load_family
from dflop.models.ways import TRAIN, WAYS
from dflop.profile.forecast import plan_probes
from dflop.profile.groups import probe_groups
from dflop.profile.sweeps import MIN_GROUPS
from dflop.records import LLM, ModuleLoad
from tests.builders import make_table
from tests.profile.test_probe import profile
from tests.train.synthetic import family, make_shapes

SHAPES = make_shapes(30, seed=1)
TABLE = make_table(LLM)
OPTIONS = dict(depths=(1, 2), num_probes=8, max_samples=4, num_repeats=2, budget_s=1e9, seed=0)


def test_probes_are_those_of_a_profile():
    planned = plan_probes(family(), SHAPES, **OPTIONS | {"num_probes": 4})
    measured, _ = profile(SHAPES, num_probes=4, max_samples=4)
    wanted = [
        (m.module, m.num_layers, m.group, ModuleLoad(m.num_items, m.num_tokens, m.sum_sq_tokens)) for m in measured
    ]
    assert [(p.module, p.num_layers, p.group, p.load) for p in planned] == wanted
    assert {p.seconds for p in planned} == {None}


def test_tables_say_how_long_and_where_the_budget_ends():
    planned = [p for p in plan_probes(family(), SHAPES, **OPTIONS, tables=[TABLE]) if p.module == LLM]
    p, x = planned[1], planned[1].load
    one_run = sum(
        p.num_layers * (t.layer_fixed + t.layer_per_token * x.num_tokens + t.layer_per_sq_token * x.sum_sq_tokens)
        + (t.edge_fixed + t.edge_per_token * x.num_tokens + t.edge_per_item * x.num_items)
        for t in (TABLE.forward_s, TABLE.backward_s)
    )
    assert not TABLE.forward_s.layer_knots
    assert p.seconds == pytest.approx(4 * one_run), "two visits, each a warm-up and a repeat"
    total_s = sum(p.seconds for p in planned)
    assert len(planned) == 2 * 8
    less = plan_probes(family(), SHAPES, **OPTIONS | {"budget_s": 3 * total_s * 0.5}, tables=[TABLE])
    assert MIN_GROUPS * 2 <= len([p for p in less if p.module == LLM]) < 2 * 8
    assert len([p for p in less if p.module == "vision"]) == 2 * 8, "nobody knows how long these take"


def test_every_way_is_planned_and_only_its_own_table_counts():
    ways = (TRAIN, WAYS["frozen"])
    planned = plan_probes(family(), SHAPES, **OPTIONS, ways=ways, tp=2, tables=[make_table(LLM)])
    assert {(p.way.name, p.tp, p.seconds) for p in planned} == {("train", 2, None), ("frozen", 2, None)}


def test_a_full_size_model_is_planned_without_being_built():
    omni = load_family("qwen2_5_omni_thinker", {}, {})
    shapes = make_shapes(20, seed=0, kinds=("image",))
    planned = plan_probes(omni, shapes, **OPTIONS)
    assert {p.module for p in planned} == {"vision", LLM}
    (group, *_) = probe_groups(shapes, LLM, num_groups=8, max_samples=4, seed=0)
    assert next(p.load for p in planned if p.module == LLM) == group.load


def test_groups_beyond_the_memory_are_left_out():
    whole = [p for p in plan_probes(family(), SHAPES, **OPTIONS, tables=[TABLE]) if p.module == LLM]
    weights = max(OPTIONS["depths"]) * TABLE.layer_param_bytes + TABLE.edge_param_bytes
    kept = [evaluate(TABLE.activation_bytes, (x.num_items, x.num_tokens, x.sum_sq_tokens), 2, True)
            for x in (p.load for p in whole if p.num_layers == 2)]  # fmt: skip
    memory_bytes = int(2 * weights + sorted(kept)[len(kept) // 2])
    found = plan_probes(family(), SHAPES, **OPTIONS, tables=[TABLE], memory_bytes=memory_bytes)
    probes = [p for p in found if p.module == LLM]
    assert 0 < len(probes) < len(whole)
    assert [p for p in whole if p in probes] == probes
    assert max(p.load.num_tokens for p in probes) < max(p.load.num_tokens for p in whole)
    assert plan_probes(family(), SHAPES, **OPTIONS, memory_bytes=1) == plan_probes(family(), SHAPES, **OPTIONS)
