"""What waiting for the slowest rank costs, by the costs of samples: under the usual orders, and in a training.

Ranks end a step together, so what one rank has less to do than the slowest is waiting. That is simulated: no machine is
slower than another, nothing overlaps, and time is what the costs say. Orders that deal out the same global batches are
compared on the same steps; `length-grouped` and dflop's window make other ones, of samples that are alike, and are
judged on their own. The verdict names the fastest of either kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dflop import units
from dflop.balance.numbers import check_positive
from dflop.balance.samples import ATTENTION_TOKENS
from dflop.cost.model import Floats
from dflop.errors import ConfigError
from dflop.run.messages import Say
from dflop.sampler.costs_of_samples import Ints, SampleCosts
from dflop.sampler.lengths import costs_of_lengths
from dflop.sampler.rank_plans import BatchPlan, Cut, Planner, RandomOrder
from dflop.schedule.data_parallel import Sync
from dflop.schedule.pack import over_ranks

RANDOM, GROUPED, BY_TOKENS, BY_COST, OURS, WINDOW = (
    "random order", "length-grouped", "Karmarkar-Karp, tokens", "Karmarkar-Karp, cost", "dflop", "dflop, window",
)  # fmt: skip
KK_UNITS = 2**40
"""Units of the dearest sample: Karmarkar-Karp counts in integers."""
MAX_MEGABATCH = 50
"""Batches of a rank that transformers sorts together, at most."""
WORTHWHILE = 1.02
"""Ratio of step times below which an order is not worth a change."""
Dealt = tuple[Ints, Ints, Ints, int]
"""`[samples]` rows of the costs, slots and ranks of one global batch, and how many slots there are."""
NUM_EXPECTED = 32
"""Steps from which is said at the start what balancing should save."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One order of samples."""

    order: str
    waiting_frac: float
    """1 - mean / longest of the ranks' times, mean over steps."""
    padding_frac: float
    """Share of all work that is done on padding."""
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
    window: int | None = None
    """Global batches whose samples are sorted together; None: as many as transformers sorts."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "batch_size", "window"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value, "estimate")


def waiting_of(order: str, steps: Sequence[Dealt], costs: SampleCosts, setting: Setting) -> Waiting:
    """Waiting of the steps of an order."""
    fracs, longest, work, useful = [], [], 0.0, 0.0
    for rows, slot, rank, num_slots in steps:
        seconds = costs.seconds[rows]
        loads = _loads(seconds, slot, rank, num_slots, setting) + costs.fixed_s
        longest.append(float(loads.sum(axis=0).max() if setting.sync == "step" else loads.max(axis=1).sum()))
        fracs.append(1 - float(loads.sum()) / setting.num_ranks / longest[-1] if longest[-1] else 0.0)
        work, useful = work + float(loads.sum()), useful + float(seconds.sum()) + costs.fixed_s * loads.size
    padding = max(0.0, 1 - useful / work) if work else 0.0
    return Waiting(order, float(np.mean(fracs)), padding, float(np.mean(longest)), len(steps))


def dealt_by(plan: BatchPlan) -> Dealt:
    """As dflop deals a global batch."""
    return plan.rows, plan.dealt.slot, plan.dealt.rank, plan.dealt.num_microbatches


def in_turn(rows: Ints, setting: Setting) -> Dealt:
    """Equal counts, batches dealt to the ranks in turn, as Accelerate shards a loader."""
    bucket = np.arange(len(rows)) * setting.num_ranks * setting.num_microbatches // len(rows)
    return rows, bucket // setting.num_ranks, bucket % setting.num_ranks, setting.num_microbatches


def _loads(seconds: Floats, slot: Ints, rank: Ints, num_slots: int, setting: Setting) -> Floats:
    """`[microbatches, ranks]`; padded, every sample of a microbatch costs what its dearest does."""
    bucket, num_buckets = slot * setting.num_ranks + rank, setting.num_ranks * num_slots
    loads: Floats = np.zeros(num_buckets)
    if setting.padded:
        np.maximum.at(loads, bucket, seconds)
        loads *= np.bincount(bucket, minlength=num_buckets)
    else:
        np.add.at(loads, bucket, seconds)
    return loads.reshape(num_slots, setting.num_ranks)


def costs_of_file(path: Path, say: Say) -> SampleCosts:
    """Costs of every sample out of a file of lengths, of costs, or of both.

    Raises:
        ConfigError: the file cannot be read, or has neither.
    """
    if path.suffix == ".npz":
        return SampleCosts.load(path)
    from dflop.data.lengths_file import read_lengths

    lengths, costs = read_lengths(path)
    if lengths is None:
        assert costs is not None
        say("costs without lengths: they stand for tokens, too")
        lengths = np.rint(costs / max(float(costs.max()), 1e-300) * 1e6)
    if costs is None:
        say(f"{len(lengths)} lengths; cost: tokens + tokens^2 / {ATTENTION_TOKENS:,} (a `cost` column overrides it)")
    return costs_of_lengths(lengths.tolist(), costs if costs is None else costs.tolist())


def estimate_waiting(costs: SampleCosts, setting: Setting, *, max_steps: int, seed: int = 0) -> list[Waiting]:
    """Waiting under each order; as `deals_of`."""
    deals = deals_of(costs, setting, max_steps=max_steps, seed=seed)
    return [waiting_of(order, steps, costs, setting) for order, steps in deals.items()]


def deals_of(costs: SampleCosts, setting: Setting, *, max_steps: int, seed: int = 0) -> dict[str, list[Dealt]]:
    """Steps under each order, `RANDOM` first, `OURS` and `WINDOW` last.

    Args:
        costs: Of every sample.
        setting: Ranks, batch, microbatches and window.
        max_steps: Simulated of each order, the first ones of an epoch.
        seed: Of the orders.

    Raises:
        ConfigError: fewer samples than a global batch, or than ranks and microbatches need.
    """
    ranks, slots, size = setting.num_ranks, setting.num_microbatches, setting.batch_size
    window = setting.window or max(2, round(_megabatch(len(costs), setting) / size))
    check_positive("max_steps", max_steps, "estimate")
    if len(costs) < size:
        raise ConfigError(
            f"{len(costs)} samples do not fill one global batch of {size}",
            where="estimate",
            hint="give more samples, or a smaller batch",
        )
    random = replace(costs, index=None, weights=None)  # how often a mixture draws them changes none of the ratios
    steps = _steps(random, setting, Cut(size), seed, max_steps)
    drawn = [rows for rows, *_ in steps]
    found = {RANDOM: [in_turn(rows, setting) for rows in drawn]}
    grouped = list(_grouped(costs.tokens, setting, np.random.default_rng(seed)))[: 20 * max_steps]
    found[GROUPED] = [in_turn(rows, setting) for rows in grouped]
    units_of = np.rint(costs.seconds / max(float(costs.seconds.max()), 1e-300) * KK_UNITS).astype(np.int64)
    for order, weights in ((BY_TOKENS, costs.tokens), (BY_COST, units_of)):
        found[order] = [(rows, *over_ranks(weights[rows], ranks, slots), slots) for rows in drawn]
    found[OURS] = steps
    found[f"{WINDOW} of {window}"] = _steps(random, setting, Cut(size, window, slots), seed, 20 * max_steps)
    return found


def verdict(found: Sequence[Waiting]) -> str:
    """What to train with, in a sentence or two: also where that is not dflop."""
    by_order = {of.order: of for of in found}
    random, grouped, ours, alike = by_order[RANDOM], by_order[GROUPED], by_order[OURS], found[-1]
    other = min((of for of in found if of not in (grouped, ours, alike)), key=lambda of: of.step_cost)
    over_other, over_random, over_grouped, by_window = (
        of.step_cost / ours.step_cost if of is not alike else ours.step_cost / alike.step_cost
        for of in (other, random, grouped, alike)
    )
    if max(over_random, by_window, 1 / over_grouped) < WORTHWHILE:
        return f"Stay with what you have: ranks wait {units.percent(random.waiting_frac)} of a step in random order."
    if over_other < WORTHWHILE:
        known = f"as fast as {other.order}: stay with that if your trainer has it"
        own = f"dflop: {units.ratio(over_random)} over random order, {known}"
    elif over_grouped < 1:
        own = f"dflop: {units.ratio(over_other)} over the best other order of random batches ({other.order})"
    else:
        best = min((other, grouped), key=lambda of: of.step_cost)
        own = f"dflop: {units.ratio(best.step_cost / ours.step_cost)} over the best other order ({best.order})"
    if 1 / over_grouped > WORTHWHILE:
        keep = "Keep group_by_length if correlated batches are acceptable to you"
        more = grouped.step_cost / alike.step_cost
        still = f"; {alike.order} is {units.ratio(more)} faster still" if more > WORTHWHILE else ""
        return f"{keep}: {units.ratio(1 / over_grouped)} faster here{still}. Else {own}."
    if by_window > WORTHWHILE:
        return f"{own}; {alike.order} is {units.ratio(by_window)} faster still if correlated batches are acceptable."
    return f"{own}."


def _steps(costs: SampleCosts, setting: Setting, cut: Cut, seed: int, max_steps: int) -> list[Dealt]:
    """The first steps of an epoch, as dflop deals them."""
    order = RandomOrder(seed, costs, padded=setting.padded)
    planner = Planner(costs, cut, order, setting.num_microbatches, None, setting.sync, setting.padded, drop_last=True)
    planner.deal_to(setting.num_ranks)
    return [dealt_by(planner.plan(step)) for step in range(min(max_steps, planner.steps_per_epoch))]


def _megabatch(num_samples: int, setting: Setting) -> int:
    """Samples that transformers' LengthGroupedSampler sorts together."""
    batch = max(1, setting.batch_size // setting.num_ranks)
    return batch * max(1, min(num_samples // (4 * batch), MAX_MEGABATCH))


def _grouped(lengths: Ints, setting: Setting, rng: np.random.Generator) -> Iterator[Ints]:
    """Global batches of transformers' LengthGroupedSampler: random megabatches, each sorted by length."""
    order, mega = rng.permutation(len(lengths)), _megabatch(len(lengths), setting)
    parts = [order[first : first + mega] for first in range(0, len(order), mega)]
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    for first in range(0, len(order) - setting.batch_size + 1, setting.batch_size):
        yield order[first : first + setting.batch_size]


class Gain:
    """What balancing saves a training, step by step: as dealt out, beside the same global batches dealt in turn."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._setting = Setting(
            planner.num_replicas, planner.cut.global_batch_size, planner.num_microbatches or 1, planner.padded,
            planner.sync,
        )  # fmt: skip
        self._plans: list[BatchPlan] = []
        self._sums, self._num_steps = np.zeros((2, 3)), 0

    def add(self, plan: BatchPlan) -> None:
        """A step that was trained."""
        self._plans.append(plan)

    def since_last(self) -> dict[str, float]:
        """Figures of the steps added since the last call, for a trainer's log; empty where there are none."""
        if not self._plans:
            return {}
        found = self._of(self._plans)
        self._sums, self._num_steps = self._sums + found * len(self._plans), self._num_steps + len(self._plans)
        self._plans = []
        (waiting, padding, step), (_, _, step_in_turn) = found.tolist()
        metrics = {"dflop/waiting_frac": waiting, "dflop/estimated_speedup": step_in_turn / step if step else 1.0}
        return {**metrics, "dflop/padding_frac": padding} if self._setting.padded else metrics

    def expected(self, step: int) -> str:
        """What the next steps should save."""
        end = min(step + NUM_EXPECTED, self._planner.first_step(self._planner.place(step)[0] + 1))
        return self._words(self._of([self._planner.plan(k) for k in range(step, end)]))

    def saved(self) -> str:
        """Over all steps so far."""
        self.since_last()
        return f"{self._num_steps} steps: {self._words(self._sums / max(1, self._num_steps))}"

    def _of(self, plans: Sequence[BatchPlan]) -> Floats:
        """`[ours, in turn][waiting, padding, step]`."""
        both = ([dealt_by(plan) for plan in plans], [in_turn(plan.rows, self._setting) for plan in plans])
        found = [waiting_of("", steps, self._planner.costs, self._setting) for steps in both]
        return np.array([(of.waiting_frac, of.padding_frac, of.step_cost) for of in found])

    def _words(self, found: Floats) -> str:
        (waiting, padding, step), before = found.tolist()
        words = f"waiting {units.percent(before[0])} -> {units.percent(waiting)}"
        if self._setting.padded:
            words += f", padding {units.percent(before[1])} -> {units.percent(padding)}"
        return f"{words}, {units.ratio(before[2] / step if step else 1.0)} as fast as the same batches dealt in turn"
