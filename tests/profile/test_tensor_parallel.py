"""Probes of modules whose layers two ranks share, on gloo."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dflop.models import load_family
from dflop.models.ways import TRAIN, WAYS
from dflop.profile.groups import make_group
from dflop.profile.probe import ModuleProbe
from dflop.profile.run import MIN_GROUPS, profile_model
from dflop.records import LLM
from tests.profile.test_probe import MODULES, SETTINGS, users
from tests.train import synthetic
from tests.train.ranks import run_ranks

CPU = torch.device("cpu")


@cache
def family():
    config = copy.deepcopy(synthetic.HF_CONFIG)
    config["text_config"]["num_key_value_heads"] = 2
    return load_family("qwen2_5_omni_thinker", config, synthetic.family().media)


def measure(group, module, num_layers, way):
    """(row, FLOP of a forward) of this process."""
    token_config = family().token_ids(synthetic.TOKEN_IDS)
    vocab_size = synthetic.VOCAB_SIZE
    probe = ModuleProbe(family(), token_config, vocab_size, module, num_layers, SETTINGS, CPU, way=way, group=group)
    samples = make_group("random", users(module, 3), module)
    forward = probe._prepare(samples)
    with FlopCounterMode(display=False) as counter:
        forward()
    return probe.measure(samples), counter.get_total_flops()


CASES = [(module, n, way) for module in MODULES for n, way in ((1, TRAIN), (2, TRAIN), (2, WAYS["recompute"]))]


def measure_all(rank, folder):
    return {(module, n, way.name): measure(dist.group.WORLD, module, n, way) for module, n, way in CASES}


def test_two_ranks_share_a_module(tmp_path):
    both = run_ranks(measure_all, 2, tmp_path)
    for module, num_layers, way in CASES:
        alone, alone_flop = measure(None, module, num_layers, way)
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
    layer = {tp: [rows[LLM, n, "train"] for n in (1, 2)] for tp, rows in ((2, both[0]),)}
    layer[1] = [measure(None, LLM, n, TRAIN) for n in (1, 2)]
    params, flops = ({tp: f(two) - f(one) for tp, (one, two) in layer.items()} for f in (param_bytes, forward_flop))
    assert params[2] == pytest.approx(params[1] / 2, rel=0.02), "norms are whole on every rank"
    assert flops[2] == flops[1] / 2


def param_bytes(measured):
    return measured[0].param_bytes


def forward_flop(measured):
    return measured[1]


def profile(rank, folder):
    """Loads that a rank probed; the ranks' budgets differ, so that one alone would stop earlier."""
    rows = profile_model(
        family(),
        synthetic.make_shapes(30, seed=1, kinds=("audio",)),
        token_config=family().token_ids(synthetic.TOKEN_IDS),
        vocab_size=synthetic.VOCAB_SIZE,
        settings=SETTINGS,
        depths=(1, 2),
        num_probes=MIN_GROUPS + 2,
        max_samples=4,
        budget_s=0.0 if rank else 1e9,
        device=CPU,
        progress=lambda _: None,
        target_frac=1e-9,
        group=dist.group.WORLD,
    )
    return [(m.module, m.num_layers, m.num_tokens, m.sum_sq_tokens, m.num_repeats, m.tp) for m in rows]


def test_ranks_run_what_the_first_one_chooses(tmp_path):
    first, second = run_ranks(profile, 2, tmp_path)
    assert first == second
    assert len(first) == 2 * 2 * (MIN_GROUPS + 2)
    assert {row[-2:] for row in first} == {(SETTINGS.num_repeats, 2)}, "both sweeps, on both ranks"


def fail(rank, folder):
    token_config = family().token_ids(synthetic.TOKEN_IDS)
    vocab_size, world = synthetic.VOCAB_SIZE, dist.group.WORLD
    probe = ModuleProbe(family(), token_config, vocab_size, LLM, 1, SETTINGS, CPU, group=world)

    def run_out(*_):
        raise MemoryError

    probe._stage.forward = run_out
    with pytest.raises(MemoryError):
        probe.measure(make_group("single", users(LLM, 1), LLM))
    return True


def test_memory_that_runs_out_ends_the_probes_of_all_ranks(tmp_path):
    assert run_ranks(fail, 2, tmp_path) == [True, True]
