"""Which group is run next, when that ends, and what is run again: of one module in one way, within a share of seconds.

This ends when all groups are done or the share is spent, but never before `MIN_GROUPS`: a fit needs that many to tell
its terms apart. So that these do not overrun the share, groups are passed over that would take too much of what is left
of it, and where it is spent the cheapest ones make up the number (`next_group`).

Machines drift over seconds, and what is timed in a slow spell would make one shape look slow. So half of a group's
repeats, and the part of the share that they need, are left for a second sweep over all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

MIN_GROUPS = 6
LARGEST_SHARE = 0.5
"""Share of the time left that one group may take while a fit lacks others. Costs of microbatches beyond the largest
group are extrapolated, so it gets more than the sixth that would be fair."""
Visit = Callable[[int, int], float | None]
"""(index of a group, timed runs behind one that is not) -> the seconds of all these, None where it does not fit."""


def sweep(sizes: Sequence[int], share_s: float, num_repeats: int, visit: Visit) -> None:
    """Visit groups: the largest that fits, untimed, so that every allocation has its size; then all, in two sweeps.

    Args:
        sizes: Tokens of the groups, in the order in which they are wanted.
        share_s: Seconds for both sweeps.
        num_repeats: Timed runs per group.
        visit: Runs a group. What is as large as one that does not fit is not visited.
    """
    left, run_s = [*range(len(sizes))], None
    while left and (run_s := visit(largest := max(left, key=lambda i: sizes[i]), 0)) is None:
        left = [i for i in left if sizes[i] < sizes[largest]]
    num_first = -(-num_repeats // 2)
    most_s = (run_s or 0.0) * (num_first + 1)
    num_again = num_repeats - num_first
    first_share_s = share_s * (num_first + 1) / (num_repeats + min(num_repeats, 2))
    took_s: dict[int, float] = {}
    while left:
        expected_s = _expected_s([sizes[i] for i in left], {sizes[i]: s for i, s in took_s.items()}, most_s)
        done = [sizes[i] for i in took_s]
        found = next_group(expected_s, [sizes[i] for i in left], done, first_share_s - sum(took_s.values()))
        if found is None:
            break
        seconds = visit(index := left[found], num_first)
        if seconds is None:
            left = [i for i in left if sizes[i] < sizes[index]]
        else:
            took_s[left.pop(found)] = seconds
    spent_s = sum(took_s.values())
    for index, seconds in took_s.items() if num_again else ():
        if spent_s + seconds * (num_again + 1) / (num_first + 1) < share_s:
            spent_s += visit(index, num_again) or 0.0


def next_group(seconds: Sequence[float], sizes: Sequence[int], done: Collection[int], left_s: float) -> int | None:
    """Index of the first group that the budget affords; while a fit lacks groups, else of the cheapest; None: enough.

    Args:
        seconds: That each group which is left would take.
        sizes: Their tokens. Of cheap ones those of a new size come first: a fit tells no terms apart by one size.
        done: Sizes of the groups that were taken.
        left_s: Until the budget is spent; may be negative.
    """
    is_enough = len(done) >= MIN_GROUPS
    limit_s = max(left_s, 0.0) * (LARGEST_SHARE if len(done) + 1 < MIN_GROUPS else 1.0)
    affordable = (i for i, s in enumerate(seconds) if s <= limit_s)
    cheapest = sorted(range(0 if is_enough else len(seconds)), key=lambda i: (sizes[i] in done, seconds[i]))
    return next(affordable, cheapest[0] if cheapest else None)


def _expected_s(sizes: Sequence[int], took_s: dict[int, float], most_s: float) -> list[float]:
    """Expected seconds of groups of these sizes: between what other sizes took, and by tokens beyond the largest.

    None takes longer than the largest does, `most_s`: where all sizes so far took what launching kernels takes, tokens
    say too much.
    """
    if not took_s:
        return [0.0] * len(sizes)
    tokens, seconds = np.array(sorted(took_s.items())).T
    found = np.interp(sizes, tokens, seconds) * np.maximum(1.0, np.array(sizes) / tokens[-1])
    return list(np.minimum(found, most_s))
