"""Groups that do not fit: rows that say so, from a stage that runs out of memory above so many tokens."""

from __future__ import annotations

import pytest
import torch

from dflop.profile import profiler
from dflop.profile.groups import make_group, probe_groups
from dflop.profile.probe import ModuleProbe, is_out_of_memory
from dflop.records import LLM
from tests.profile.measuring import measure
from tests.profile.test_probe import new_probe, profile, users
from tests.train.synthetic import make_shapes

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 8 EB"),
]


def limit_tokens(probe, most, error):
    """Let the stage of `probe` fail above `most` tokens; returns the tokens of all its calls."""
    stage, seen = probe._stage, []
    forward = stage.forward

    def limited(hidden, *args):
        seen.append(len(hidden))
        if len(hidden) > most:
            raise error
        return forward(hidden, *args)

    stage.forward = limited
    return seen


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_group_that_does_not_fit_is_a_row_and_the_next_one_is_measured(error):
    probe = new_probe(LLM, 1)
    samples = users(LLM, 4)
    small, large = make_group("single", samples[:1], LLM), make_group("random", samples, LLM)
    expected = measure(probe, small)
    limit_tokens(probe, large.load.num_tokens - 1, error)
    for num_repeats in (0, 2):
        found = measure(probe, large, num_repeats)
        assert (found.status, found.num_tokens, found.num_repeats) == ("oom", large.load.num_tokens, 0)
        assert (found.forward_s, found.backward_s, found.activation_bytes) == (0.0, 0.0, 0)
        assert (found.group, found.param_bytes) == ("random", expected.param_bytes)
    after = measure(probe, small)
    assert (after.status, after.activation_bytes) == ("ok", expected.activation_bytes)


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_other_errors_go_on():
    probe = new_probe(LLM, 1)
    limit_tokens(probe, 0, RuntimeError("shapes do not match"))
    group = make_group("single", users(LLM, 1), LLM)
    for num_repeats in (0, 2):
        with pytest.raises(RuntimeError, match="shapes"):
            measure(probe, group, num_repeats)


def limited_profile(monkeypatch, num_probes, num_fitting, depths):
    """(most tokens that fit at these depths, groups drawn, rows, tokens tried by depth, lines)."""
    shapes, tried = make_shapes(40, seed=3), {}
    groups = probe_groups(shapes, LLM, num_groups=num_probes, max_samples=8, seed=0)
    most = sorted(g.load.num_tokens for g in groups)[num_fitting - 1]

    class Limited(ModuleProbe):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if self._num_layers in depths:
                tried[self._num_layers] = limit_tokens(self, most, MemoryError())

    monkeypatch.setattr(profiler, "ModuleProbe", Limited)
    found, lines = profile(shapes, num_probes=num_probes, max_samples=8, only=LLM)
    return most, groups, found, tried, lines


def test_nothing_larger_than_what_did_not_fit_is_tried(monkeypatch):
    most, groups, rows, tried, lines = limited_profile(monkeypatch, 12, 9, (1, 2))
    failed = [m.num_tokens for m in rows if m.status == "oom"]
    assert failed == sorted((g.load.num_tokens for g in groups if g.load.num_tokens > most), reverse=True)
    for depth in (1, 2):
        tokens = [m.num_tokens for m in rows if m.num_layers == depth and m.status == "ok"]
        assert tokens == [g.load.num_tokens for g in groups if g.load.num_tokens <= most]
    assert [n for n in tried[1] if n > most] == failed, "each only once"
    assert [n for n in tried[2] if n > most] == [], "what did not fit at one layer is not tried at two"
    assert lines[-1].endswith(f", {len(failed)} out of memory")


def test_what_fits_only_at_the_smaller_depth_is_not_tried_at_the_larger_again(monkeypatch):
    most, _, rows, tried, _ = limited_profile(monkeypatch, 8, 6, (2,))
    failed = [m for m in rows if m.status == "oom"]
    assert {m.num_layers for m in failed} == {2}
    assert len([n for n in tried[2] if n > most]) == len(failed) == 2
    assert max(m.num_tokens for m in rows if m.status == "ok") == most
