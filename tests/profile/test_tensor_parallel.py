"""Probes of modules whose layers two ranks share, on gloo."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dflop.models.ways import TRAIN, WAYS
from dflop.profile import profiler
from dflop.profile.groups import make_group
from dflop.profile.sweeps import MIN_GROUPS
from dflop.records import LLM
from tests.profile.measuring import measure
from tests.profile.test_probe import MODULES, SETTINGS, new_probe, profile, users
from tests.train import synthetic
from tests.train.ranks import run_ranks

FAMILY = synthetic.family(kv_heads=2)


def measured(group, module, num_layers, way):
    """(row, FLOP of a forward) of this process."""
    probe = new_probe(module, num_layers, way, model=FAMILY, group=group)
    samples = make_group("random", users(module, 3), module)
    forward = probe._prepare(samples)
    with FlopCounterMode(display=False) as counter:
        forward()
    return measure(probe, samples), counter.get_total_flops()


CASES = [(LLM, 1, TRAIN), *((module, 2, way) for module in MODULES for way in (TRAIN, WAYS["recompute"]))]


def measure_all(rank, folder):
    return {(module, n, way.name): measured(dist.group.WORLD, module, n, way) for module, n, way in CASES}


def test_two_ranks_share_a_module(tmp_path):
    both = run_ranks(measure_all, 2, tmp_path)
    whole = {(module, n, way.name): measured(None, module, n, way) for module, n, way in CASES}
    for module, num_layers, way in CASES:
        alone, alone_flop = whole[module, num_layers, way.name]
        for rows in both:
            row, flop = rows[module, num_layers, way.name]
            assert (row.tp, row.num_layers, row.recompute, row.status) == (2, num_layers, way.recompute, "ok")
            assert (row.num_items, row.num_tokens, row.sum_sq_tokens) == (
                alone.num_items, alone.num_tokens, alone.sum_sq_tokens,
            )  # fmt: skip
            assert min(row.forward_s, row.backward_s, row.optimizer_s) > 0
            assert row.param_bytes < alone.param_bytes
            assert row.activation_bytes < alone.activation_bytes or way.recompute
            assert flop < alone_flop
    params, flops = zip(*(of_one_layer(rows) for rows in (both[0], whole)), strict=True)
    assert params[0] == pytest.approx(params[1] / 2, rel=0.02), "norms are whole on every rank"
    assert flops[0] == pytest.approx(flops[1] / 2, rel=0.01), "shares of tokens are padded to one size"


def of_one_layer(measured):
    """(parameter bytes, FLOP) of the LLM, from depths 1 and 2."""
    (one, one_flop), (two, two_flop) = (measured[LLM, n, "train"] for n in (1, 2))
    return two.param_bytes - one.param_bytes, two_flop - one_flop


def profile_llm(rank, folder):
    """Loads that a rank probed; for the second one every visit takes as long as the budget, so that it would stop."""
    if rank:
        profiler.time = SimpleNamespace(perf_counter=itertools.count(0.0, 1e9).__next__)
    shapes = synthetic.make_shapes(30, seed=1, kinds=("audio",))
    options = {"max_samples": 4, "only": LLM, "group": dist.group.WORLD}
    rows, _ = profile(shapes, FAMILY, **options)
    return [(m.module, m.num_layers, m.num_tokens, m.sum_sq_tokens, m.num_repeats, m.tp) for m in rows]


def test_ranks_run_what_the_first_one_chooses(tmp_path):
    first, second = run_ranks(profile_llm, 2, tmp_path)
    assert first == second
    assert len(first) == 2 * (MIN_GROUPS + 2)
    assert {row[-2:] for row in first} == {(SETTINGS.num_repeats, 2)}, "both sweeps, on both ranks"


def fail(rank, folder):
    probe = new_probe(LLM, 1, model=FAMILY, group=dist.group.WORLD)

    def run_out(*_):
        raise MemoryError

    probe._stage.forward = run_out
    with pytest.raises(MemoryError):
        measure(probe, make_group("single", users(LLM, 1), LLM))
    return True


def test_memory_that_runs_out_ends_the_probes_of_all_ranks(tmp_path):
    assert run_ranks(fail, 2, tmp_path) == [True, True]
