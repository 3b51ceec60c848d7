"""Optimizers whose states replicas share out end where unshared ones do, to the last bit, and run ahead of weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.parallel.stages import build_stages
from dflop.parallel.topology import seat_of, seats
from dflop.records import LLM
from dflop.train import buckets
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.stages import pieces_of
from dflop.train.zero import owners_of
from tests.models.generic.small import Small
from tests.train import synthetic
from tests.train.layouts import Layout
from tests.train.rank import Rank, weights_come_late
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_plan, make_step_plan, sharing_optimizer

RATE, NUM_STEPS, MAX_NORM = 1e-2, 3, 0.1
"""Steps before the last, which is clipped."""


CUT = ({"vision": 2, "audio": 2, LLM: 2}, {LLM: 2})
CASES = {
    "tied ends, bfloat16": (Layout(CUT, dp=2, tied=True), (LLM,), torch.bfloat16),
    "tp2, recomputed": (
        Layout(({"vision": 2, LLM: 4},), tp=2, dp=2, recompute=("vision", LLM)), ("vision", LLM), torch.float32,
    ),
    "cp2": (Layout(({"vision": 2, LLM: 4},), cp=2, recompute=(LLM,)), ("vision", LLM), torch.float32),
    "some modules, a tower frozen, limited": (
        Layout(CUT, dp=2, frozen=("vision.tower",), limited=True), ("vision", LLM), torch.float32,
    ),
}  # fmt: skip
"""How it is trained, modules that share out their optimizer, type of the weights."""


def batches(layout):
    """Of the second no replica has anything for the encoders."""
    found = dataclasses.replace(layout.subject, num_steps=NUM_STEPS + 1, batch_size=6).batches
    return [[s for s in batch if step != 1 or not s.items] for step, batch in enumerate(found)]


def worker(rank, folder, name, shard, bucket_bytes, device="cpu", optimizer="adamw"):
    """Norms, losses, weights before and behind the clipped step, states, modules, whose rows a state is of, and layers
    that ran ahead of weights."""
    buckets.BUCKET_BYTES = bucket_bytes
    layout, modules, dtype = CASES[name]
    plan, subject = sharing_optimizer(layout.plan, *modules if shard else ()), layout.subject
    it = Rank(
        rank, plan, subject.family, subject.build().to(dtype), frozen=layout.frozen, device=device,
        rate=RATE, weight_decay=0.1, optimizer=optimizer,
    )  # fmt: skip
    missing = weights_come_late()
    ahead = []
    it.stage_of[LLM].layers[0].register_forward_hook(lambda *_: ahead.append(len(missing)))
    seen, weights = [], []
    for step, batch in enumerate(batches(layout)):
        if step == NUM_STEPS:
            it.optimizer.wait()
            weights.append({n: p.detach().clone() for n, p in it.names.items()})
        step_plan = make_step_plan(plan, batch, step, idle=True)
        max_norm = 1e9 if step < NUM_STEPS else MAX_NORM
        trace = it.step(SyntheticSource(batch), batch, step_plan)
        seen.append(it.update(trace, RATE, max_norm))
    state = it.optimizer.state()
    weights.append({n: p.detach().clone() for n, p in it.names.items()})
    module_of = {n: part.module for part, stage in zip(it.seat.parts, it.stages, strict=True) for n in stage.names}
    return seen, weights, state, module_of, it.optimizer.rows, max(ahead)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_states_equal_the_unshared_ones(name, tmp_path):
    layout, modules, _ = CASES[name]
    plan = sharing_optimizer(layout.plan, *modules)
    whole = run_ranks(worker, plan.num_processes, tmp_path, name, False, 256 << 20)
    # Buckets so small that many are needed.
    shared = run_ranks(worker, plan.num_processes, tmp_path, name, True, 10_000)
    for (seen, weights, states, _, rows, ahead), (want_seen, want_weights, want_states, *_) in zip(
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
                want = want_states[n][key][slice(*rows[n])] if n in rows and value.dim() else want_states[n][key]
                torch.testing.assert_close(value, want, rtol=2e-6, atol=1e-7, msg=f"{key} of {n}")
    assert any(of_rank[4] for of_rank in shared), "some of an embedding's rows are somebody's"
    assert_every_state_once(plan, shared, whole)
    assert_copies_are_equal(plan, shared)


def test_muon_updates_whole_matrices_of_owners_as_without_them(tmp_path):
    name = "tied ends, bfloat16"
    plan = sharing_optimizer(CASES[name][0].plan, LLM)
    whole = run_ranks(worker, plan.num_processes, tmp_path, name, False, 256 << 20, "cpu", "muon")
    shared = run_ranks(worker, plan.num_processes, tmp_path, name, True, 10_000, "cpu", "muon")
    for (_, weights, states, *_), (_, want, *_) in zip(shared, whole, strict=True):
        # The clipped step is left out: bfloat16 iterations over a gradient that differs by a rounding differ by more.
        assert all(torch.equal(p, want[0][n]) for n, p in weights[0].items())
        assert any("momentum_buffer" in state for state in states.values())
    assert_every_state_once(plan, shared, whole)
    assert_copies_are_equal(plan, shared)


@pytest.mark.parametrize(("tp", "shards", "cut"), [(2, {}, "tp 2"), (1, {"w": torch.ones(2)}, "FSDP2")])
def test_muon_is_refused_where_ranks_hold_parts_of_matrices(tp, shards, cut):
    plan = make_inline_plan(({LLM: 2},), dp=1, tp=tp, num_microbatches=1)
    stage: Any = SimpleNamespace(names={"w": torch.nn.Parameter(torch.ones(2, 2))}, shards=shards)
    settings = OptimizerSettings(RATE, 0.0, optimizer="muon")
    with pytest.raises(ConfigError, match=cut):
        make_optimizer(plan, seat_of(plan, 0), [stage], cast(Any, None), settings)
    stage.names["w"].requires_grad_(False)
    assert not make_optimizer(plan, seat_of(plan, 0), [stage], cast(Any, None), settings).state()


def worker_with_experts(rank, folder, modules):
    """Norms and losses of two steps, weights, states; of four replicas every two share experts."""
    buckets.BUCKET_BYTES = 10_000
    subject = Small("qwen3_vl_moe")
    layers = {spec.module: spec.num_layers for spec in subject.family.specs()}
    plan = sharing_optimizer(make_inline_plan([layers], dp=4, ep=2, num_microbatches=2), *modules)
    it = Rank(rank, plan, subject.family, subject.build(), rate=RATE, weight_decay=0.1)
    seen = []
    for step, batch in enumerate(subject.batches):
        trace = it.step(subject.source(batch), batch, make_step_plan(plan, batch, step, text_only_slot=False))
        seen.append(it.update(trace, RATE, 1e9))
    state = it.optimizer.state()
    weights = {n: p.detach().clone() for n, p in it.names.items()}
    return seen, weights, state, it.optimizer.rows, sorted(it.stage_of[LLM].of_experts)


def test_experts_that_replicas_share_are_updated_by_one_of_those_with_the_same(tmp_path):
    whole = run_ranks(worker_with_experts, 4, tmp_path, ())
    shared = run_ranks(worker_with_experts, 4, tmp_path, ("vision", LLM))
    for (seen, weights, states, rows, _), (want_seen, want_weights, want_states, *_) in zip(shared, whole, strict=True):
        for (norm, loss), (want_norm, want_loss) in zip(seen, want_seen, strict=True):
            assert (norm, loss) == pytest.approx((want_norm, want_loss), rel=1e-6)
        # gloo adds up four ranks in another order for an owner alone.
        for n, p in weights.items():
            torch.testing.assert_close(p, want_weights[n], rtol=1e-5, atol=1e-6, msg=n)
        for n, state in states.items():
            for key, value in state.items():
                want = want_states[n][key][slice(*rows[n])] if n in rows and value.dim() else want_states[n][key]
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-7, msg=f"{key} of {n}")
    of_experts = shared[0][4]
    assert of_experts
    for name in whole[0][2]:
        holders = [rank for rank in range(4) if name in shared[rank][2]]
        if name in of_experts:
            assert len(holders) == 2
            assert {rank % 2 for rank in holders} == {0, 1}
        held = sum(num_values(of_rank, name) for of_rank in shared)
        assert held == num_values(whole[0], name) * (2 if name in of_experts else 1), name
    loads = [sum(x.numel() for of in states.values() for x in of.values()) for _, _, states, *_ in shared]
    assert max(loads) < 1.5 * min(loads)


def assert_every_state_once(plan, ranks, whole):
    """Replicas together hold each state once where the module shares them out, else each of them holds all."""
    for seat in (s for s in seats(plan) if s.dp_rank == 0):
        place = (seat.module, seat.stage, seat.tp_rank)
        replicas = [s.rank for s in seats(plan) if (s.module, s.stage, s.tp_rank) == place]
        for name, module in ranks[seat.rank][3].items():
            held = sum(num_values(ranks[r], name) for r in replicas)
            is_shared = plan.module(module).shard_optimizer
            assert held == num_values(whole[seat.rank], name) * (1 if is_shared else len(replicas)), name


def num_values(of_rank, name):
    """Of what a rank's optimizer keeps of a parameter, counts of steps left out."""
    return sum(x.numel() for x in of_rank[2].get(name, {}).values() if x.dim())


def assert_copies_are_equal(plan, ranks):
    """Replicas, and the two ends of a tied embedding, hold the same weights bit by bit."""
    if any(m.parallel.tp > 1 for m in plan.modules):
        return  # a name then stands for different parts
    first: dict[str, torch.Tensor] = {}
    for _, weights, *_ in ranks:
        for name, p in weights[-1].items():
            assert torch.equal(p, first.setdefault(name, p)), name


def stages_of(plan, seat):
    cpu = torch.device("cpu")
    return build_stages(
        synthetic.tiny_model(), synthetic.family(), pieces_of(plan, seat), cpu, kernel=attention.SDPA
    )[0]  # fmt: skip


def test_owners_are_balanced_and_agreed_on():
    layout, modules, _ = CASES["some modules, a tower frozen, limited"]
    plan = sharing_optimizer(layout.plan, *modules)
    for stage in (0, 1):
        found = []
        for seat in (s for s in seats(plan) if s.stage == stage):
            stages = stages_of(plan, seat)
            found.append((owners_of(plan, seat, stages), stages, seat))
        (owners, stages, seat), (others, _, _) = found
        assert owners == others
        by_module = {part.module: s for part, s in zip(seat.parts, stages, strict=True)}
        assert not any(n in owners for m, s in by_module.items() if m == "audio" for n in s.names)
        names = {n: p for m, s in by_module.items() if m != "audio" for n, p in s.names.items() if p.requires_grad}
        assert set(owners) == set(names)
        loads = [sum(p.numel() // len(owners[n]) for n, p in names.items() if d in owners[n]) for d in range(2)]
        assert max(loads) - min(loads) <= max(p.numel() for p in names.values())
    alone = sharing_optimizer(make_plan({LLM: (1, 1)}, num_microbatches=1), LLM)
    stages = stages_of(alone, seat_of(alone, 0))
    assert owners_of(alone, seat_of(alone, 0), stages) == {}, "one replica shares nothing"
