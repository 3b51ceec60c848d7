"""What waiting for the slowest rank costs a trainer, by the costs of its samples alone, under the usual orders.

Ranks end a step together, so what one rank has less to do than the slowest is waiting. That is simulated: no machine is
slower than another, nothing overlaps, and time is what the costs say. Orders that deal out the same global batches are
compared on the same steps; `length-grouped` makes other global batches, and is judged on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop.cost.model import Floats
from dflop.errors import ConfigError
from dflop.run.messages import Say
from dflop.sampler.costs_of_samples import Ints, SampleCosts
from dflop.sampler.lengths import ATTENTION_TOKENS, costs_of_lengths
from dflop.sampler.numbers import check_positive
from dflop.sampler.rank_plans import Planner
from dflop.schedule.data_parallel import Sync
from dflop.schedule.karmarkar_karp import over_ranks

RANDOM, GROUPED, BY_TOKENS, BY_COST, OURS = (
    "random order", "length-grouped", "Karmarkar-Karp, tokens", "Karmarkar-Karp, cost", "dflop",
)  # fmt: skip
KK_UNITS = 2**40
"""Of the dearest sample: Karmarkar-Karp counts in integers."""
MAX_MEGABATCH = 50
"""Batches that transformers sorts together, at most."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One order of samples."""

    order: str
    waiting_frac: float
    """1 - mean / longest of the ranks' times, mean over steps."""
    padding_frac: float
    """Of all work, what is done on padding."""
    step_cost: float
    """Mean over steps, in the unit of the costs."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How a trainer cuts its data."""

    num_ranks: int
    batch_size: int
    """Samples of a global batch."""
    num_microbatches: int = 1
    padded: bool = False
    sync: Sync = "step"


def costs_of_file(path: Path, say: Say) -> SampleCosts:
    """Costs of every sample out of a file of lengths, of costs, or of both.

    Raises:
        ConfigError: the file cannot be read, or has neither.
    """
    if path.suffix == ".npz":
        return SampleCosts.load(path)
    from dflop.data.lengths_file import read_lengths  # polars

    lengths, costs = read_lengths(path)
    if lengths is None:
        assert costs is not None
        say("costs without lengths: they stand for tokens, too")
        lengths = np.rint(costs / max(float(costs.max()), 1e-300) * 1e6)
    if costs is None:
        say(f"{len(lengths)} lengths; cost: tokens + tokens^2 / {ATTENTION_TOKENS:,} (a `cost` column overrides it)")
    return costs_of_lengths(lengths.tolist(), costs if costs is None else costs.tolist())


def estimate_waiting(costs: SampleCosts, setting: Setting, *, max_steps: int, seed: int = 0) -> list[Waiting]:
    """Waiting under each order, `RANDOM` first and `OURS` last.

    Args:
        costs: Of every sample.
        setting: Ranks, batch and microbatches.
        max_steps: Simulated of each order, the first ones of an epoch.
        seed: Of the orders.

    Raises:
        ConfigError: fewer samples than a global batch, or than ranks and microbatches need.
    """
    ranks, slots = setting.num_ranks, setting.num_microbatches
    numbers = {"ranks": ranks, "batch": setting.batch_size, "microbatches": slots, "max_steps": max_steps}
    for name, number in numbers.items():
        check_positive(name, number, "estimate")
    if len(costs) < setting.batch_size:
        raise ConfigError(
            f"{len(costs)} samples do not fill one global batch of {setting.batch_size}",
            where="estimate",
            hint="give more samples, or a smaller batch",
        )
    planner = Planner(
        costs, setting.batch_size, num_microbatches=slots, max_tokens=None, sync=setting.sync, padded=setting.padded,
        seed=seed, drop_last=True,
    )  # fmt: skip
    planner.deal_to(ranks)
    steps = [planner.plan(step) for step in range(min(max_steps, planner.steps_per_epoch))]
    where = np.arange(len(costs)) if costs.index is None else costs.index
    at = np.empty(int(where.max()) + 1, dtype=np.int64)
    at[where] = np.arange(len(where))
    drawn = [at[plan.samples] for plan in steps]
    found = [_waiting(RANDOM, [(rows, _in_turn(len(rows), setting)) for rows in drawn], costs, setting)]
    grouped = list(_grouped(costs.tokens, setting, np.random.default_rng(seed)))[: 20 * max_steps]
    found.append(_waiting(GROUPED, [(rows, _in_turn(len(rows), setting)) for rows in grouped], costs, setting))
    units = np.rint(costs.seconds / max(float(costs.seconds.max()), 1e-300) * KK_UNITS).astype(np.int64)
    for order, weights in ((BY_TOKENS, costs.tokens), (BY_COST, units)):
        dealt = [(rows, over_ranks(weights[rows], ranks, slots)) for rows in drawn]
        found.append(_waiting(order, dealt, costs, setting))
    ours = [(rows, (plan.dealt.slot, plan.dealt.rank)) for rows, plan in zip(drawn, steps, strict=True)]
    return [*found, _waiting(OURS, ours, costs, setting)]


def _waiting(
    order: str, steps: Sequence[tuple[Ints, tuple[Ints, Ints]]], costs: SampleCosts, setting: Setting
) -> Waiting:
    fracs, longest, work, useful = [], [], 0.0, 0.0
    for rows, (slot, rank) in steps:
        seconds = costs.seconds[rows]
        loads = _loads(seconds, slot * setting.num_ranks + rank, setting) + costs.fixed_s
        longest.append(float(loads.sum(axis=0).max() if setting.sync == "step" else loads.max(axis=1).sum()))
        fracs.append(1 - float(loads.sum()) / setting.num_ranks / longest[-1] if longest[-1] else 0.0)
        work, useful = work + float(loads.sum()), useful + float(seconds.sum()) + costs.fixed_s * loads.size
    padding = max(0.0, 1 - useful / work) if work else 0.0
    return Waiting(order, float(np.mean(fracs)), padding, float(np.mean(longest)), len(steps))


def _loads(seconds: Floats, bucket: Ints, setting: Setting) -> Floats:
    """`[microbatches, ranks]`; padded, every sample of a microbatch costs what its dearest does."""
    num_buckets = setting.num_ranks * setting.num_microbatches
    loads: Floats = np.zeros(num_buckets)
    if setting.padded:
        np.maximum.at(loads, bucket, seconds)
        loads *= np.bincount(bucket, minlength=num_buckets)
    else:
        np.add.at(loads, bucket, seconds)
    return loads.reshape(setting.num_microbatches, setting.num_ranks)


def _in_turn(num_samples: int, setting: Setting) -> tuple[Ints, Ints]:
    """(slot, rank): equal counts, batches dealt to the ranks in turn, as Accelerate shards a loader."""
    bucket = np.arange(num_samples) * setting.num_ranks * setting.num_microbatches // num_samples
    return bucket // setting.num_ranks, bucket % setting.num_ranks


def _grouped(lengths: Ints, setting: Setting, rng: np.random.Generator) -> Iterator[Ints]:
    """Global batches of transformers' LengthGroupedSampler: random megabatches, each sorted by length."""
    batch = max(1, setting.batch_size // setting.num_ranks)
    order, mega = rng.permutation(len(lengths)), batch * max(1, min(len(lengths) // (4 * batch), MAX_MEGABATCH))
    parts = [order[first : first + mega] for first in range(0, len(order), mega)]
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    for first in range(0, len(order) - setting.batch_size + 1, setting.batch_size):
        yield order[first : first + setting.batch_size]
