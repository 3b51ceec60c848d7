from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import check_processes, module_candidates, split_layers
from dflop.plan.memory import USABLE_MEMORY_FRAC, max_stages_beyond, stage_memory_bytes
from dflop.records import ModuleLoad
from tests.builders import make_cost, make_specs, make_table

LOAD = ModuleLoad(4, 400, 40_000)


def slowest(layers, layer_s: float, edge_s: float) -> float:
    return max(n * layer_s + edge_s * (i == len(layers) - 1) for i, n in enumerate(layers))


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0.1, 10), st.floats(0, 30))
def test_layer_split_is_the_best_of_all(num_layers, pp, layer_s, edge_s):
    if pp > num_layers:
        return
    layers = split_layers(num_layers, pp, layer_s=layer_s, edge_s=edge_s)
    assert sum(layers) == num_layers
    assert min(layers) >= 1
    every = [c for c in itertools.product(range(1, num_layers + 1), repeat=pp) if sum(c) == num_layers]
    assert slowest(layers, layer_s, edge_s) == min(slowest(c, layer_s, edge_s) for c in every)


def test_layer_split_without_edge_is_even():
    assert split_layers(28, 4, layer_s=1.0, edge_s=0.0) == (7, 7, 7, 7)
    assert split_layers(28, 4, layer_s=1.0, edge_s=4.0) == (8, 8, 8, 4)


def test_candidates_respect_every_limit():
    (spec,) = make_specs(max_pp=3)
    found = module_candidates(spec, make_cost(), max_processes=6, max_dp=2, typical=LOAD)
    assert [(c.parallel.pp, c.parallel.dp) for c in found] == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


def test_tp_needs_a_table():
    (spec,) = make_specs()
    with pytest.raises(InfeasiblePlanError, match=r"allows tp \[1\], has cost tables for tp \[2\]"):
        module_candidates(spec, CostModel([make_table("llm", tp=2)]), max_processes=4, max_dp=4, typical=LOAD)


def test_too_few_processes_fail_fast():
    check_processes(["vision", "llm"], 2)
    with pytest.raises(InfeasiblePlanError, match="3 modules in split layout need at least 3 processes") as failure:
        check_processes(["vision", "audio", "llm"], 2)
    assert "the cluster has 2" in str(failure.value)
    assert failure.value.exit_code == 3


def test_memory_counts_state_and_microbatches_in_flight():
    (spec,) = make_specs()
    (candidate,) = [
        c for c in module_candidates(spec, make_cost(), max_processes=2, max_dp=1, typical=LOAD) if c.parallel.pp == 2
    ]
    peaks = stage_memory_bytes(spec, candidate, make_cost(), LOAD, num_microbatches=8, num_stages_beyond=0)
    first, last = candidate.layers_per_stage
    assert peaks[0] == 16 * (first * 1_000_000 + 2_000_000) + 2 * first * 400 * 10_000
    assert peaks[1] == 16 * (last * 1_000_000 + 2_000_000) + (last + 1) * 400 * 10_000


@given(st.integers(1, 8), st.integers(0, 3), st.integers(50, 400), st.integers(0, 6))
def test_depth_limit_is_the_memory_limit_solved_for_depth(m, which, limit_mb, beyond):
    (spec,) = make_specs()
    candidate = module_candidates(spec, make_cost(), max_processes=4, max_dp=1, typical=LOAD)[which]
    usable = USABLE_MEMORY_FRAC * limit_mb * 1e6
    deepest = max_stages_beyond(spec, candidate, make_cost(), LOAD, num_microbatches=m, usable_bytes=usable)
    peaks = stage_memory_bytes(spec, candidate, make_cost(), LOAD, num_microbatches=m, num_stages_beyond=beyond)
    assert (max(peaks) <= usable) == (beyond <= deepest)
