from __future__ import annotations

import gc

import pytest
import torch

from dflop.profile.timing import no_garbage_collection, optimizer_step_s, time_phases

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_wall", [False, True])
def test_phases_are_timed_apart_and_run_once(monkeypatch, by_wall):
    now, calls = [0.0], []
    name, other = ("perf_counter", "thread_time") if by_wall else ("thread_time", "perf_counter")
    monkeypatch.setattr(f"dflop.profile.timing.time.{name}", lambda: now[0])
    monkeypatch.setattr(f"dflop.profile.timing.time.{other}", lambda: -1.0)

    def phase(what, seconds):
        calls.append(what)
        now[0] += seconds

    result = time_phases(lambda: phase("forward", 2.0), lambda _: phase("backward", 5.0), CPU, by_wall=by_wall)
    assert (result, calls) == ((2.0, 5.0), ["forward", "backward"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_step_leaves_weights_alone_and_skips_those_without_gradient(dtype):
    used, unused = (torch.nn.Parameter(torch.randn(50, dtype=dtype)) for _ in "ab")
    before = used.detach().clone()
    used.grad = torch.randn(50, dtype=dtype)
    assert optimizer_step_s([used, unused], CPU, 3) > 0
    assert torch.equal(used, before)
    assert unused.grad is None
    assert optimizer_step_s([unused], CPU, 3) == 0.0


def test_optimizer_is_not_timed_on_gradients_of_zero():
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.zeros(8)
    optimizer_step_s([p], CPU, 1)
    assert (p.grad != 0).all(), "roots of zeros take a CPU several times as long"


def fail_in_a_timed_phase():
    with no_garbage_collection():
        assert not gc.isenabled()
        raise MemoryError


def test_no_collection_inside_and_as_before_outside():
    assert gc.isenabled()
    with pytest.raises(MemoryError):
        fail_in_a_timed_phase()
    assert gc.isenabled()
