from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from dflop.parallel.connect import connect, pairs
from dflop.parallel.topology import make_groups, seats
from dflop.records import LLM
from tests.parallel.test_topology import plans
from tests.train.parity import Omni, Trial, train
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan


def test_pairs_of_a_chain_of_unlike_grids():
    plan = make_plan({"vision": (2, 1), LLM: (2, 1, 2)}, num_microbatches=1)
    # Rank 1 is the encoder's last stage; its rows go to both tensor-parallel ranks of the LLM, which stay side by side.
    assert pairs(plan) == [(0, 1), (1, 2), (1, 3), (2, 4), (3, 5)]


def test_pairs_of_an_inline_chain():
    plan = make_inline_plan([{"vision": 2, LLM: 1}, {LLM: 3}], dp=2, num_microbatches=1)
    assert pairs(plan) == [(0, 2), (1, 3)]


@given(plans())
def test_every_rank_has_somebody_to_talk_to(plan):
    found = pairs(plan)
    assert found == sorted(set(found))
    assert all(low < high for low, high in found)
    assert {rank for pair in found for rank in pair} == {seat.rank for seat in seats(plan)}


def peers_met(rank, folder, plan):
    """Pairs of which this rank exchanged messages, when it connected and when it trained."""
    subject = Omni(num_steps=1)
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
        make_plan({"vision": (1, 2), "audio": (1, 1), LLM: (2, 1)}, num_microbatches=3),
        make_plan({"vision": (1, 1, 2), LLM: (1, 2)}, num_microbatches=3),
    ],
    ids=["several encoders, pipeline", "tensor parallelism, replicas"],
)
def test_training_needs_the_connections_that_are_opened_and_no_others(plan, tmp_path):
    met = run_ranks(peers_met, plan.num_processes, tmp_path, plan)
    connected = set().union(*(m[0] for m in met))
    used = set().union(*(m[1] for m in met))
    assert connected == used == set(pairs(plan))
