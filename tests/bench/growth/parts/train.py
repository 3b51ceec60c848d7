"""Training's own books: samplers, pieces of checkpoints, seats, messages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.parallel.topology import seats
from dflop.records import LLM
from dflop.sampler import BalancedBatchSampler, sample_costs
from dflop.schedule.scheduler import schedule_step
from dflop.simulate.step import step_nodes
from dflop.train import manifest
from dflop.train.blocks import blocks_of
from dflop.train.state import name_problem, share_out
from dflop.train.wire import PlanMessage, RankTimes
from tests.bench.growth.part import Part, Work
from tests.bench.growth.parts.schedule import COST, plan_of, seconds
from tests.builders import make_plan, random_batch


class _Replicas:
    """As many ranks that hold the same as a group would have."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return 0


def sampler(size: int, _folder: Path) -> Work:
    seconds_s, tokens = seconds(size)
    costs = sample_costs(tokens.tolist(), cost=seconds_s.tolist())

    def work() -> None:
        found = BalancedBatchSampler(costs, global_batch_size=64, num_microbatches=2, rank=0, num_replicas=4)
        for number in range(4):
            found.planned(number)

    return work


def epoch(size: int, _folder: Path) -> Work:
    seconds_s, tokens = seconds(size)
    costs = sample_costs(tokens.tolist(), cost=seconds_s.tolist())
    return lambda: sum(
        1 for _ in BalancedBatchSampler(costs, global_batch_size=64, num_microbatches=2, rank=0, num_replicas=4)
    )


def pieces(size: int, _folder: Path) -> Work:
    return _shared_out(size, 4)


def pieces_by_ranks(size: int, _folder: Path) -> Work:
    return _shared_out(100, size)


def _shared_out(num_parameters: int, num_ranks: int) -> Work:
    blocks = [b for i in range(num_parameters) for b in blocks_of(f"layers.{i}.weight", torch.empty(1 + i % 7), None)]

    def gather(held: list[Any], mine: Any, group: object) -> None:  # what ranks would send one another
        held[:] = [copy.copy(mine) for _ in held]

    def work() -> None:
        before, dist.all_gather_object = dist.all_gather_object, gather
        try:
            share_out(blocks, _Replicas(num_ranks))
        finally:
            dist.all_gather_object = before

    return work


def names(size: int, _folder: Path) -> Work:
    stored = {f"model/layers.{i}.weight": torch.Size((i % 7,)) for i in range(size)}
    shapes = {name: tuple(shape) for name, shape in stored.items()}
    return lambda: name_problem(shapes, stored)


def files(size: int, folder: Path) -> Work:
    """Publishing a checkpoint of so many files, and finding it again."""
    temporary = folder / ".tmp-new"
    temporary.mkdir()
    for i in range(size):
        (temporary / f"{i}.distcp").write_bytes(b"x")
    states = {f"{i}.distcp": manifest.file_state(temporary / f"{i}.distcp") for i in range(size)}

    def work() -> None:
        manifest.publish(temporary, {"next_step": 1, "name": manifest.name_of(1)}, states, keep=2)
        manifest.newest_sound(folder)

    return work


def all_seats(size: int, _folder: Path) -> Work:
    plan = make_plan({"vision": size, LLM: size}, llm_pp=4)
    return lambda: list(seats(plan))


def plan_message(size: int, _folder: Path) -> Work:
    plan, batch = plan_of(4, 16, size), random_batch(size, encoders=("vision",))
    given = schedule_step(run_id="", step=0, plan=plan, batch=batch, cost=COST, policy="arrival")
    spans = {(*node, k): (1, 2, 3, 0.1, 0.2) for node in step_nodes(plan) for k in range(16)}
    return lambda: PlanMessage.decode(PlanMessage(given, spans).encode())


def times_message(size: int, _folder: Path) -> Work:
    given = RankTimes(0, 0, 1.0, {k: 0.1 for k in range(size)}, 1.0)
    return lambda: RankTimes.decode(given.encode())


PARTS = (
    Part("sampler's steps by samples of the dataset", (10_000, 100_000, 1_000_000), sampler, 1.0, "one permutation"),
    Part("sampler's epoch by samples of the dataset", (1_000, 10_000, 100_000), epoch, 1.0, "a plan per batch"),
    Part("pieces of a checkpoint by parameters", (100, 1_000, 10_000), pieces, 1.1, "sorts"),
    Part("pieces of a checkpoint by replicas", (8, 80, 800), pieces_by_ranks, 1.0, "who holds a piece is listed"),
    Part("names of a checkpoint by parameters", (100, 1_000, 10_000), names, 1.3,
         "sets of text: those that fit into caches are compared faster"),
    Part("files of a checkpoint by files", (30, 300, 3_000), files, 1.0, "each is read once", 1.0, True),
    Part("seats of a plan by replicas", (100, 1_000, 10_000), all_seats, 1.0, "a seat per rank"),
    Part("message with a step plan by samples", (48, 480, 4_800), plan_message, 1.0, "text per item"),
    Part("message with times by microbatches", (100, 1_000, 10_000), times_message, 1.0, "text per microbatch"),
)  # fmt: skip
