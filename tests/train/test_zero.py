"""Optimizers whose states replicas share out end where unshared ones do, to the last bit, and run ahead of weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflop.parallel.topology import seat_of, seats
from dflop.records import LLM
from dflop.train import buckets
from dflop.train.stages import make_stages
from dflop.train.zero import owners_of
from tests.train import synthetic
from tests.train.rank import Rank, weights_come_late
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_plan, make_shapes, make_step_plan

RATE, NUM_STEPS, MAX_NORM = 1e-2, 3, 0.1
"""Steps before the last, which is clipped."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What trains where."""

    layout: dict[str, tuple[int, ...]] | list[dict[str, int]]
    shared: frozenset[str]
    kinds: tuple[str, ...]
    tied: bool = False
    frozen: tuple[str, ...] = ()
    recompute: str = ""
    dtype: torch.dtype = torch.float32

    def plan(self, *, shard=True):
        if isinstance(self.layout, dict):
            plan = make_plan(self.layout, num_microbatches=3)
        else:
            plan = make_inline_plan(self.layout, dp=2, num_microbatches=3)
        modules = (
            dataclasses.replace(
                m, shard_optimizer=shard and m.module in self.shared, recompute=m.module == self.recompute
            )
            for m in plan.modules
        )
        return dataclasses.replace(plan, modules=tuple(modules))


CASES = {
    "split pp2 dp2, tied, bfloat16": Case({LLM: (2, 2)}, frozenset({LLM}), (), tied=True, dtype=torch.bfloat16),
    "split tp2 dp2, recomputed": Case({LLM: (1, 2, 2)}, frozenset({LLM}), (), recompute=LLM),
    "inline pp2 dp2, some modules, a tower frozen": Case(
        [{"vision": 2, "audio": 2, LLM: 2}, {LLM: 2}], frozenset({"vision", LLM}), ("image", "audio"),
        frozen=("vision.tower",),
    ),
}  # fmt: skip


def batches(kinds):
    """Of the second no replica has anything for the encoders."""
    found = [make_shapes(40, seed=step, kinds=kinds or ("image",)) for step in range(NUM_STEPS + 1)]
    has_media = [bool(kinds) and step != 1 for step in range(NUM_STEPS + 1)]
    return [[s for s in shapes if has or not s.items][:6] for shapes, has in zip(found, has_media, strict=True)]


def worker(rank, folder, name, shard, bucket_bytes):
    """Norms, losses, weights before and behind the clipped step, states, modules; layers that ran ahead of weights."""
    buckets.BUCKET_BYTES = bucket_bytes
    case = CASES[name]
    plan, tp = case.plan(shard=shard), case.plan().module(LLM).parallel.tp
    model = synthetic.tiny_model(tied=case.tied, kv_heads=tp).to(case.dtype)
    it = Rank(rank, plan, synthetic.family(tp), model, frozen=case.frozen)
    optimizer, missing = it.optimizer(RATE, 0.1), weights_come_late()
    ahead = []
    it.stage_of[LLM].layers[0].register_forward_hook(lambda *_: ahead.append(len(missing)))
    seen, weights = [], []
    for step, batch in enumerate(batches(case.kinds)):
        if step == NUM_STEPS:
            optimizer.wait()
            weights.append({n: p.detach().clone() for n, p in it.names.items()})
        step_plan = make_step_plan(plan, batch, step, text_only_slot=bool(case.kinds), idle=True)
        max_norm = 1e9 if step < NUM_STEPS else MAX_NORM
        seen.append(it.train(optimizer, SyntheticSource(batch), batch, step_plan, RATE, max_norm))
    state = optimizer.state()
    weights.append({n: p.detach().clone() for n, p in it.names.items()})
    module_of = {n: part.module for part, stage in zip(it.seat.parts, it.stages, strict=True) for n in stage.names}
    return seen, weights, state, module_of, max(ahead)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_states_equal_the_unshared_ones(name, tmp_path):
    plan = CASES[name].plan()
    whole = run_ranks(worker, plan.num_processes, tmp_path, name, False, 256 << 20)
    # Buckets so small that many are needed.
    shared = run_ranks(worker, plan.num_processes, tmp_path, name, True, 10_000)
    for (seen, weights, states, _, ahead), (want_seen, want_weights, want_states, *_) in zip(
        shared, whole, strict=True
    ):
        assert ahead, "layers should run while weights of later ones are on their way"
        for (norm, loss), (want_norm, want_loss) in zip(seen, want_seen, strict=True):
            assert loss == want_loss
            assert norm == pytest.approx(want_norm, rel=1e-6)
        assert seen[-1][0] > MAX_NORM, "clipping should have had something to do"
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
    for _, weights, *_ in ranks:
        for name, p in weights[-1].items():
            assert torch.equal(p, first.setdefault(name, p)), name


def test_owners_are_balanced_and_agreed_on():
    plan = CASES["inline pp2 dp2, some modules, a tower frozen"].plan()
    for stage in (0, 1):
        found = []
        for seat in (s for s in seats(plan) if s.stage == stage):
            stages, _ = make_stages(synthetic.tiny_model(), synthetic.family(), seat, None)
            found.append((owners_of(plan, seat, stages), stages, seat))
        (owners, stages, seat), (others, _, _) = found
        assert owners == others
        by_module = {part.module: s for part, s in zip(seat.parts, stages, strict=True)}
        assert not any(n in owners for m, s in by_module.items() if m == "audio" for n in s.names)
        names = {n: p for m, s in by_module.items() if m != "audio" for n, p in s.names.items() if p.requires_grad}
        assert set(owners) == set(names)
        loads = [sum(p.numel() for n, p in names.items() if owners[n] == d) for d in range(2)]
        assert max(loads) - min(loads) <= max(p.numel() for p in names.values())
    (one,) = make_plan({LLM: (1, 1)}, num_microbatches=1).modules
    alone = dataclasses.replace(plan, layout="split", modules=(dataclasses.replace(one, shard_optimizer=True),))
    stages, _ = make_stages(synthetic.tiny_model(), synthetic.family(), seat_of(alone, 0), None)
    assert owners_of(alone, seat_of(alone, 0), stages) == {}, "one replica shares nothing"
