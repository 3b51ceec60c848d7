from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dflop.parallel.topology import MAX_MESSAGE_CTAS, Groups, connect, make_groups, pairs, rank_of, seat_of, seats
from dflop.records import LLM, ModulePlan, ParallelSpec
from tests.train.parity import Omni, Trial, train
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_plan, make_step_plan

DEGREES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@st.composite
def plans(draw):
    """Plans of any degrees, the processes of the modules in any order."""
    base = make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (1, 1)}, num_microbatches=1)
    modules, first_rank = {}, 0
    for name in draw(st.permutations(("vision", "audio", LLM))):
        tp, pp, dp, cp = draw(DEGREES)
        layers = tuple(draw(st.lists(st.integers(1, 5), min_size=pp, max_size=pp)))
        shards = draw(st.sampled_from([1, dp * cp]))
        of = ParallelSpec(tp, pp, dp, cp, ep=draw(st.sampled_from([n for n in (1, 2, 3) if dp * cp % n == 0])))
        modules[name] = ModulePlan(name, of, first_rank, layers, (0,) * pp, parameter_shards=shards)
        first_rank += tp * pp * dp * cp
    return replace(base, modules=tuple(modules[m.module] for m in base.modules))


@given(plans())
def test_every_rank_has_one_seat(plan):
    found = list(seats(plan))
    assert [s.rank for s in found] == list(range(plan.num_processes))
    for seat in found:
        assert rank_of(plan.module(seat.module), seat.stage, seat.replica, seat.tp_rank) == seat.rank
        assert seat_of(plan, seat.rank) == seat


@given(plans())
def test_stages_hold_every_layer_once_and_every_rank_has_somebody_to_talk_to(plan):
    for module in plan.modules:
        spans = sorted({s.part(module.module).layers for s in seats(plan) if s.module == module.module})
        assert len(spans) == module.parallel.pp
        assert [end - first for first, end in spans] == list(module.layers_per_stage)
        ends = [0, *(end for _, end in spans)]
        assert [first for first, _ in spans] == ends[:-1]
    found = pairs(plan)
    assert found == sorted(set(found))
    assert all(low < high for low, high in found)
    assert {rank for pair in found for rank in pair} == {seat.rank for seat in seats(plan)}


@given(plans(), st.booleans())
def test_every_rank_makes_the_same_groups_and_ends_share_one_where_an_embedding_lives_on_both(plan, is_tied):
    made = []
    with_layers = {part.layers: s.stage for s in seats(plan) for part in s.parts if s.module == LLM}.values()
    for seat in seats(plan):
        made.append([])
        with patch.multiple(
            dist,
            get_world_size=lambda: plan.num_processes,
            get_backend=lambda: "gloo",
            new_group=lambda ranks, **_: made[-1].append(ranks) or ranks,
        ):
            groups = make_groups(plan, seat.rank, timeout_s=60, is_tied=is_tied)
        assert seat.rank in groups.replicas
        assert seat.rank in groups.tensor
        spec = plan.module(seat.module).parallel
        assert len(groups.replicas) == spec.dp * spec.cp
        in_context = [s.rank for s in seats(plan) if (s.module, s.stage, s.dp_rank, s.tp_rank)
                      == (seat.module, seat.stage, seat.dp_rank, seat.tp_rank)]  # fmt: skip
        assert groups.context == (in_context if spec.cp > 1 else None)
        if spec.ep > 1:
            place = groups.replicas.index(seat.rank)
            assert groups.experts == groups.replicas[place // spec.ep * spec.ep :][: spec.ep]
            assert groups.same_experts == (groups.shards or groups.replicas)[place % spec.ep :: spec.ep]
        else:
            assert (groups.experts, groups.same_experts) == (None, None)
        is_end = seat.module == LLM and seat.stage in (min(with_layers), max(with_layers))
        assert bool(groups.tied) == (is_tied and is_end and len(with_layers) > 1)
        if groups.tied:
            held = {(s.stage, s.replica) for s in seats(plan) if s.rank in groups.tied}
            replicas = {seat.replica} if plan.module(LLM).parameter_shards > 1 else range(spec.num_replicas)
            assert held == {(stage, r) for stage in (min(with_layers), max(with_layers)) for r in replicas}
    assert all(each == made[0] for each in made)


def test_messages_between_stages_take_few_channels_of_nccl():
    plan, made = make_plan({LLM: (2, 1)}, num_microbatches=1), []
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
    with patch.multiple(
        dist, get_world_size=lambda: 2, get_backend=lambda: "nccl", create=True, ProcessGroupNCCL=nccl,
        new_group=lambda ranks, pg_options=None, **_: made.append(pg_options) or len(made) - 1,
    ):  # fmt: skip
        groups = make_groups(plan, 0, timeout_s=60)
    assert {made[groups.forward].config.max_ctas, made[groups.backward].config.max_ctas} == {MAX_MESSAGE_CTAS}
    assert [options for options in made if options is not None] == [made[groups.forward]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_no_communicator_is_opened_for_a_group_of_one(size, monkeypatch):
    asked, group = [], SimpleNamespace(size=lambda: size)
    groups = SimpleNamespace(**dict.fromkeys((field.name for field in fields(Groups)), group))
    monkeypatch.setattr(dist, "all_reduce", lambda token, group: asked.append(group))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    connect(groups, make_plan({LLM: (1, 1)}, num_microbatches=1), torch.device("cpu"))
    assert bool(asked) == (size > 1)


def peers_met(rank, folder, plan):
    """Pairs of which this rank exchanged messages, when it connected and when it trained."""
    subject = Omni(num_steps=1, batch_size=6)
    steps = tuple(make_step_plan(plan, batch, step) for step, batch in enumerate(subject.batches))
    groups = make_groups(plan, rank, timeout_s=60)
    met = []

    def noting(method):
        def wrapped(tensor, peer, *args, **kwargs):
            met[-1].add((min(rank, peer), max(rank, peer)))
            return method(tensor, peer, *args, **kwargs)

        return wrapped

    dist.send, dist.isend, dist.recv = noting(dist.send), noting(dist.isend), noting(dist.recv)
    met.append(set())
    connect(groups, plan, torch.device("cpu"))
    met.append(set())
    train(rank, folder, Trial(subject, plan, steps))
    return met


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            make_plan({"vision": (1, 2), "audio": (1, 1), LLM: (2, 1)}, num_microbatches=3),
            marks=pytest.mark.lane("layouts"),
        ),
        make_plan({"vision": (1, 1, 2), LLM: (1, 2)}, num_microbatches=3),
    ],
    ids=["several encoders, pipeline", "tensor parallelism, replicas"],
)
def test_training_needs_the_connections_that_are_opened_and_no_others(plan, tmp_path):
    met = run_ranks(peers_met, plan.num_processes, tmp_path, plan)
    connected = set().union(*(m[0] for m in met))
    used = set().union(*(m[1] for m in met))
    assert connected == used == set(pairs(plan))
