"""Samples or rollouts of one step, dealt to ranks by cost: the scheduler's search as a function of lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from dflop.balance.numbers import check_positive, finite_numbers, whole_numbers
from dflop.cost.model import Floats
from dflop.errors import ConfigError
from dflop.schedule.data_parallel import RankPlan, Sync, balance_ranks
from dflop.schedule.items import Ints

ATTENTION_TOKENS = 20_000
"""Length of a text at which attention takes as long as all the rest: a dense model of about 7B, flash attention."""
WHERE = "dflop.balance.deal"


def text_costs(num_tokens: Ints) -> Floats:
    """What texts of `[N]` lengths cost, in tokens: tokens + tokens^2 / `ATTENTION_TOKENS`."""
    tokens = num_tokens.astype(np.float64)
    return tokens + tokens**2 / ATTENTION_TOKENS


def deal(
    lengths: Iterable[int],
    num_ranks: int,
    costs: Iterable[float] | Callable[[int], float] | None = None,
    *,
    max_tokens: int | None = None,
    num_microbatches: int | None = None,
    sync: Sync = "step",
    groups: Sequence[Hashable] | None = None,
    equal_counts: bool = False,
) -> RankPlan:
    """Ranks, and microbatches, for the samples of one step; `plan.of_rank(r)` are rank r's positions per microbatch.

    The result depends on the arguments alone: every rank that calls it finds the same plan.

    Args:
        lengths: `[N]` tokens of each sample.
        num_ranks: Data-parallel ranks.
        costs: `[N]` in any unit, or a function of a position; None: what texts of these lengths cost.
        max_tokens: That no microbatch exceeds, unless a single sample does; there are as few as that takes, equally
            many on every rank. None: no limit.
        num_microbatches: Per rank; None: as few as `max_tokens` takes, or one.
        sync: Where ranks wait for one another: once per `step`, or in every `microbatch` (FSDP).
        groups: `[N]` what belongs together, e.g. the prompt of each rollout: a group stays in one microbatch.
        equal_counts: Whether no rank may have more samples, or groups, than the average rounded up. Does not go with
            `max_tokens` or several microbatches.

    Raises:
        ConfigError: numbers that are none or contradict one another, or samples that do not fit.
    """
    check_positive("num_ranks", num_ranks, WHERE)
    tokens = whole_numbers("lengths", lengths, WHERE)
    for name, number in (("max_tokens", max_tokens), ("num_microbatches", num_microbatches)):
        if number is not None:
            check_positive(name, number, WHERE)
    if equal_counts and (max_tokens is not None or (num_microbatches or 1) > 1):
        raise ConfigError(
            f"equal_counts with max_tokens={max_tokens} and num_microbatches={num_microbatches}", where=WHERE,
            hint="deal with equal_counts, then the samples of each rank by deal(..., num_ranks=1, max_tokens=...)",
        )  # fmt: skip
    given = map(costs, range(len(tokens))) if callable(costs) else costs
    of_sample = text_costs(tokens) if given is None else finite_numbers("costs", given, WHERE)
    of_group = np.arange(len(tokens)) if groups is None else _numbered(groups)
    if not len(tokens) == len(of_sample) == len(of_group):
        found = f"there are {len(tokens)} lengths, {len(of_sample)} costs and {len(of_group)} samples in groups"
        raise ConfigError(found, where=WHERE, hint="give one of each per sample")
    num_groups = int(of_group.max()) + 1 if len(of_group) else 0
    seconds = np.bincount(of_group, weights=of_sample, minlength=num_groups).astype(np.float64)
    sizes = np.bincount(of_group, weights=tokens, minlength=num_groups).astype(np.int64)
    if equal_counts:  # every group is one token, and a rank has room for so many
        sizes, max_tokens = np.ones(num_groups, dtype=np.int64), max(1, -(-num_groups // num_ranks))
    plan = balance_ranks(
        seconds, sizes, num_ranks, cap_tokens=max_tokens or max(1, int(sizes.sum())),
        num_microbatches=num_microbatches or (None if max_tokens and not equal_counts else 1), sync=sync,
    )  # fmt: skip
    return replace(plan, rank=plan.rank[of_group], slot=plan.slot[of_group])


def _numbered(groups: Sequence[Hashable]) -> Ints:
    """`[N]` numbers of the groups, in the order in which they come first."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[name] for name in groups], dtype=np.int64)
