"""Scheduling: a whole step, what it is made of, and pure data parallelism."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM, Plan
from dflop.schedule.anneal import search
from dflop.schedule.bound import lower_bound
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.items import Ints, module_items
from dflop.schedule.pack import pack, token_cap, vector_lpt
from dflop.schedule.padded import balance_padded
from dflop.schedule.place import split_items
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.rank_search import first_fit
from dflop.schedule.scheduler import schedule_step
from dflop.simulate.step import step_nodes
from tests.bench.growth.part import Part, Work
from tests.builders import make_cost, make_plan, random_batch

COST = make_cost("vision")
NUM_RANKS, NUM_SLOTS, PER_BUCKET = 16, 4, 4
BUDGETED = "moves and simulated operations have a budget; a pass over samples and operations is left"
BUCKETS = BUDGETED + "; vector LPT holds every sample against every bucket, and both grow"
EVALS = "evaluated moves have a budget"


def plan_of(num_ranks: int, num_microbatches: int, num_samples: int) -> Plan:
    return make_plan(
        {"vision": max(1, num_ranks // 2), LLM: num_ranks}, llm_pp=2, num_microbatches=num_microbatches,
        global_batch_size=num_samples,
    )  # fmt: skip


def step(num_ranks: int, num_microbatches: int, num_samples: int, policy: str) -> Work:
    plan, batch = plan_of(num_ranks, num_microbatches, num_samples), random_batch(num_samples, encoders=("vision",))
    return lambda: schedule_step(run_id="", step=0, plan=plan, batch=batch, cost=COST, policy=policy)


def by_batch(size: int, _folder: Path) -> Work:
    return step(4, 16, size, "balanced")


def by_microbatches(size: int, _folder: Path) -> Work:
    return step(4, size, 16 * size, "balanced")


def by_ranks(size: int, _folder: Path) -> Work:
    return step(size, 8, 32 * size, "balanced")


def quick_by_batch(size: int, _folder: Path) -> Work:
    return step(4, 16, size, "quick")


def quick_by_ranks(size: int, _folder: Path) -> Work:
    return step(size, 8, 32 * size, "quick")


def slow_ranks(size: int, _folder: Path) -> Work:
    """Every fourth node slower than the others."""
    plan, batch = plan_of(size, 8, 32 * size), random_batch(32 * size, encoders=("vision",))
    slowness = {node: 1.2 for node in step_nodes(plan)[::4]}
    return lambda: schedule_step(
        run_id="", step=0, plan=plan, batch=batch, cost=COST, policy="quick", slowness=slowness
    )


def search_alone(size: int, _folder: Path) -> Work:
    job = StepJob(plan_of(4, 16, size), random_batch(size, encoders=("vision",)), COST)
    effort, linear = Effort(), job.linear
    num_moves = min(effort.max_simulations, effort.num_ops // (linear.num_ops + 400))
    return lambda: search(linear, [], num_profiles=1, num_moves=num_moves)


def judging(size: int, _folder: Path) -> Work:
    """What one simulation of an assignment takes, once the batch is known."""
    job = StepJob(plan_of(size, 8, 32 * size), random_batch(32 * size, encoders=("vision",)), COST)
    assignment = job.assign("arrival", Effort())
    return lambda: job.judge.step_s(assignment)


def seconds(size: int) -> tuple[Floats, Ints]:
    """(seconds, tokens) of samples, lognormal."""
    tokens = np.clip(np.random.default_rng(0).lognormal(6.5, 1.0, size), 30, 8192).astype(np.int64)
    return 3e-4 * tokens + 1.3e-8 * tokens.astype(float) ** 2, tokens


def two_modules(size: int) -> tuple[Floats, Ints]:
    """(seconds of two modules, tokens)."""
    found, tokens = seconds(size)
    return np.column_stack([found, np.random.default_rng(1).permutation(found)]), tokens


def certified(size: int, _folder: Path) -> Work:
    return packed(size, NUM_RANKS * NUM_SLOTS)


def certified_by_buckets(size: int, _folder: Path) -> Work:
    return packed(PER_BUCKET * size, size)


def packed(num_samples: int, num_buckets: int) -> Work:
    weights_s, tokens = two_modules(num_samples)
    cap = token_cap(tokens, num_buckets)
    return lambda: pack(weights_s, tokens, num_buckets, cap_tokens=cap, max_evals=100_000)


def greedy_by_buckets(size: int, _folder: Path) -> Work:
    weights_s, tokens = two_modules(PER_BUCKET * size)
    cap = token_cap(tokens, size)
    return lambda: vector_lpt(weights_s, tokens, size, cap)


def bounds(size: int, _folder: Path) -> Work:
    weights_s, _ = two_modules(PER_BUCKET * size)
    return lambda: lower_bound(weights_s, size)


def over_ranks(num_samples: int, num_ranks: int, *, sync: str = "step", uneven: bool = False) -> Work:
    seconds_s, tokens = seconds(num_samples)
    cap = token_cap(tokens, num_ranks * NUM_SLOTS)
    slowness = np.where(np.arange(num_ranks) % 8 == 0, 1.3, 1.0) if uneven else None
    return lambda: balance_ranks(
        seconds_s, tokens, num_ranks, cap_tokens=cap, fixed_s=0.05, num_microbatches=NUM_SLOTS, sync=sync,
        slowness=slowness,
    )  # fmt: skip


def ranks_by_samples(size: int, _folder: Path) -> Work:
    return over_ranks(size, NUM_RANKS)


def ranks_by_ranks(size: int, _folder: Path) -> Work:
    return over_ranks(16 * size, size)


def slots_by_ranks(size: int, _folder: Path) -> Work:
    return over_ranks(16 * size, size, sync="microbatch")


def uneven_by_ranks(size: int, _folder: Path) -> Work:
    return over_ranks(16 * size, size, uneven=True)


def padded(size: int, _folder: Path) -> Work:
    seconds_s, tokens = seconds(size)
    return lambda: balance_padded(seconds_s, tokens, NUM_RANKS, num_microbatches=size // NUM_RANKS // 4)


def bins(size: int, _folder: Path) -> Work:
    _, tokens = seconds(size)
    return lambda: first_fit(tokens, 16_384, compiled=True)


def items_of_slots(size: int, _folder: Path) -> Work:
    items = module_items(random_batch(size, encoders=("vision",)), "vision")
    slot = np.arange(len(items.num_tokens)) * 16 // len(items.num_tokens)
    return lambda: split_items(slot, items.num_tokens.astype(float), 16, 8)


PARTS = (
    Part("scheduler by samples of a batch", (48, 480, 4_800), by_batch, 1.0, BUDGETED),
    Part("scheduler by microbatches", (8, 80, 800), by_microbatches, 2.0, BUCKETS),
    Part("scheduler by replicas", (4, 40, 400), by_ranks, 2.0, BUCKETS),
    Part("quick plan by samples of a batch", (48, 480, 4_800), quick_by_batch, 1.0, BUDGETED),
    Part("quick plan by replicas", (4, 40, 400), quick_by_ranks, 2.0, BUCKETS),
    Part("quick plan beside slow ranks by replicas", (4, 40, 400), slow_ranks, 2.0, BUCKETS),
    Part("search by samples of a batch", (48, 480, 4_800), search_alone, 1.0,
         "a move costs what it touches until the budget of operations is spent, then all moves together cost the same"),
    Part("simulation of an assignment by replicas", (4, 40, 400), judging, 1.0, "a pass over operations"),
    Part("certified balance by samples", (160, 1_600, 16_000), certified, 1.1, "sorts; " + EVALS),
    Part("certified balance by buckets", (32, 320, 3_200), certified_by_buckets, 2.0,
         "every sample is held against every bucket, and samples grow with buckets; " + EVALS),
    Part("vector LPT by buckets", (32, 320, 3_200), greedy_by_buckets, 2.0, "every sample against every bucket"),
    Part("lower bound by buckets", (100, 1_000, 10_000), bounds, 1.2,
         "sorts a fixed number of mixtures: n log n, and what fits into caches is sorted faster per sample"),
    Part("balance over ranks by samples", (256, 2_560, 25_600), ranks_by_samples, 1.1, "sorts; " + EVALS),
    Part("balance over ranks by ranks", (16, 160, 1_600), ranks_by_ranks, 1.1,
         "a heap of ranks, samples grow with them; " + EVALS),
    Part("balance of every microbatch by ranks", (16, 160, 1_600), slots_by_ranks, 1.1,
         "a heap of microbatches, samples grow with them; " + EVALS),
    Part("balance over ranks of two speeds by ranks", (16, 160, 1_600), uneven_by_ranks, 1.1,
         "a heap of ranks per speed, samples grow with them; " + EVALS),
    Part("padded balance by samples", (256, 2_560, 25_600), padded, 1.1, "sorts, then halves an interval"),
    Part("first fit by samples", (1_000, 10_000, 100_000), bins, 1.2,
         "a search in a tree of bins per sample; one that no cache holds takes longer"),
    Part("items over encoder ranks by samples", (100, 1_000, 10_000), items_of_slots, 1.1, "sorts"),
)  # fmt: skip
