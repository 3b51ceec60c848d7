"""What waiting for the slowest rank costs a trainer, by the costs of its samples alone, under the usual orders.

Orders that deal out the same global batches are compared on the same steps; `length-grouped` and dflop's window make
other ones, of samples that are alike, and are judged on their own. The verdict names the fastest of either kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflop import units
from dflop.errors import ConfigError
from dflop.run.messages import Say
from dflop.sampler.costs_of_samples import Ints, SampleCosts, check_positive
from dflop.sampler.lengths import ATTENTION_TOKENS, costs_of_lengths
from dflop.sampler.rank_plans import Cut, Planner, RandomOrder
from dflop.sampler.waiting import Dealt, Setting, Waiting, dealt_by, in_turn, waiting_of
from dflop.schedule.karmarkar_karp import over_ranks

RANDOM, GROUPED, BY_TOKENS, BY_COST, OURS, WINDOW = (
    "random order", "length-grouped", "Karmarkar-Karp, tokens", "Karmarkar-Karp, cost", "dflop", "dflop, window",
)  # fmt: skip
KK_UNITS = 2**40
"""Of the dearest sample: Karmarkar-Karp counts in integers."""
MAX_MEGABATCH = 50
"""Batches of a rank that transformers sorts together, at most."""
WORTHWHILE = 1.02
"""Ratio of step times below which an order is not worth a change."""


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
    numbers = {"ranks": ranks, "batch": size, "microbatches": slots, "window": window, "max_steps": max_steps}
    for name, number in numbers.items():
        check_positive(name, number, "estimate")
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
