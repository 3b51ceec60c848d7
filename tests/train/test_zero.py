"""Optimizers whose states replicas share out end where unshared ones do, tied embeddings, mixed settings and all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflop.parallel.topology import seat_of, seats
from dflop.records import LLM
from dflop.train import buckets, flat
from dflop.train.stages import make_stages
from dflop.train.zero import owners_of
from tests.train import synthetic
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_inline_plan, make_plan

RATE, MAX_NORMS = 1e-2, (1e9, 0.5)
"""The second step is clipped."""
LAYOUTS = {
    "split pp2 dp2, tied": ("split", {LLM: (2, 2)}, {LLM}),
    "split tp2 dp2": ("split", {LLM: (1, 2, 2)}, {LLM}),
    "inline pp2 dp2, some modules": ("inline", [{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], {"audio", LLM}),
}


def plan_of(name, *, shard):
    kind, layout, shared = LAYOUTS[name]
    if kind == "split":
        plan = make_plan(layout, num_microbatches=1)
    else:
        plan = make_inline_plan(layout, dp=2, num_microbatches=1)
    modules = (dataclasses.replace(m, shard_optimizer=shard and m.module in shared) for m in plan.modules)
    return dataclasses.replace(plan, modules=tuple(modules))


def set_gradients(rank, step, names, sharded):
    """Different on replicas; equal on tensor-parallel ranks where they hold the whole."""
    for n, (name, p) in enumerate(names.items()):
        seed = 1000 * n + 10 * step + (rank if name in sharded else rank // 2)
        gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        p.grad = gradient if p.grad is None else p.grad.copy_(gradient)


def worker(rank, folder, name, shard, bucket_bytes):
    flat.BUCKET_BYTES = buckets.BUCKET_BYTES = bucket_bytes
    plan = plan_of(name, shard=shard)
    tp = plan.module(LLM).parallel.tp
    it = Rank(rank, plan, synthetic.family(tp), synthetic.tiny_model(tied="tied" in name, kv_heads=tp))
    seat, names, optimizer = it.seat, it.names, it.optimizer(RATE, 0.1)
    reducer = it.reducer(optimizer)
    norms, weights = [], []
    for step, max_norm in enumerate(MAX_NORMS):
        set_gradients(seat.dp_rank * 2 + seat.tp_rank, step, names, it.parts)
        reducer.reduce()
        norm, _ = reducer.norm_and_loss(0.0)
        norms.append(norm)
        reducer.clip(norm, max_norm)
        optimizer.step(RATE)
        reducer.zero()
        weights.append({n: p.detach().clone() for n, p in names.items()})
    module_of = {n: part.module for part, stage in zip(seat.parts, it.stages, strict=True) for n in stage.names}
    return norms, weights, optimizer.state(), module_of


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_and_states_equal_the_unshared_ones(name, tmp_path):
    plan = plan_of(name, shard=True)
    whole = run_ranks(worker, plan.num_processes, tmp_path, name, False, 256 << 20)
    # Buckets so small that many are needed.
    shared = run_ranks(worker, plan.num_processes, tmp_path, name, True, 10_000)
    for (norms, weights, states, _), (want_norms, want_weights, want_states, _) in zip(shared, whole, strict=True):
        assert norms == pytest.approx(want_norms, rel=1e-6)
        assert norms[1] > MAX_NORMS[1], "clipping should have had something to do"
        assert all(torch.equal(p, want_weights[0][n]) for n, p in weights[0].items())
        # The norm sums in another order, and a clipped gradient is scaled by it.
        for n, p in weights[1].items():
            torch.testing.assert_close(p, want_weights[1][n], rtol=1e-6, atol=1e-7, msg=n)
        for n, state in states.items():
            for key, value in state.items():
                torch.testing.assert_close(value, want_states[n][key], rtol=2e-6, atol=1e-7, msg=f"{key} of {n}")
    assert_every_state_once(plan, shared, whole)
    assert_copies_are_equal(plan, shared)


def assert_every_state_once(plan, ranks, whole):
    """Replicas together hold each state once where the module shares them out, else each of them holds all."""
    for seat in (s for s in seats(plan) if s.dp_rank == 0):
        place = (seat.module, seat.stage, seat.tp_rank)
        replicas = [s.rank for s in seats(plan) if (s.module, s.stage, s.tp_rank) == place]
        for name, module in ranks[seat.rank][3].items():
            held = sum(name in ranks[r][2] for r in replicas)
            trains = name in whole[seat.rank][2]
            assert held == trains * (1 if plan.module(module).shard_optimizer else len(replicas)), name


def assert_copies_are_equal(plan, ranks):
    """Replicas, and the two ends of a tied embedding, hold the same weights bit by bit."""
    if any(m.parallel.tp > 1 for m in plan.modules):
        return  # a name then stands for different parts
    first: dict[str, torch.Tensor] = {}
    for _, weights, _, _ in ranks:
        for name, p in weights[-1].items():
            assert torch.equal(p, first.setdefault(name, p)), name


def test_owners_are_balanced_and_agreed_on():
    plan = plan_of("inline pp2 dp2, some modules", shard=True)
    for stage in (0, 1):
        found = []
        for seat in (s for s in seats(plan) if s.stage == stage):
            stages, _ = make_stages(synthetic.tiny_model(), synthetic.family(), seat, None)
            found.append((owners_of(plan, seat, stages), stages, seat))
        (owners, stages, seat), (others, _, _) = found
        assert owners == others
        by_module = {part.module: s for part, s in zip(seat.parts, stages, strict=True)}
        assert not any(n in owners for m, s in by_module.items() if m == "vision" for n in s.names)
        names = {n: p for m, s in by_module.items() if m != "vision" for n, p in s.names.items() if p.requires_grad}
        assert set(owners) == set(names)
        loads = [sum(p.numel() for n, p in names.items() if owners[n] == d) for d in range(2)]
        assert max(loads) - min(loads) <= max(p.numel() for p in names.values())
    (one,) = make_plan({LLM: (1, 1)}, num_microbatches=1).modules
    alone = dataclasses.replace(plan, layout="split", modules=(dataclasses.replace(one, shard_optimizer=True),))
    stages, _ = make_stages(synthetic.tiny_model(), synthetic.family(), seat_of(alone, 0), None)
    assert owners_of(alone, seat_of(alone, 0), stages) == {}, "one replica shares nothing"
