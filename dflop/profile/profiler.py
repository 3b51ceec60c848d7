"""Profile every module of a model within a time budget.

The budget is split over modules and ways of running them. A group of samples is timed at every depth before the next
one of `groups.probe_groups`. This ends when all of them are done or the module's share of the budget is spent, but
never before `MIN_GROUPS`: a fit needs that many to tell its terms apart. So that these do not overrun the budget,
groups are passed over that would take too much of what is left of it, and where it is spent the cheapest ones make up
the number (`next_group`).

Machines drift over seconds, and what is timed in a slow spell would make one shape look slow. So half of a group's
repeats, and the part of the budget that they need, are left for a second sweep over all groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dflop.errors import DataError
from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.groups import ProbeGroup, probe_groups
from dflop.profile.probe import GroupVisits, ModuleProbe, ProbeSettings
from dflop.records import Measurement, SampleShape

MIN_GROUPS = 6
LARGEST_SHARE = 0.5
"""Of the time that is left: what one group may take while a fit lacks others. Costs of microbatches beyond the largest
group are extrapolated, so it gets more than the sixth that would be fair."""
Choice = TypeVar("Choice", int | None, bool)
Floats = npt.NDArray[np.float64]


def profile_model(
    family: Family,
    shapes: Sequence[SampleShape],
    *,
    token_config: Mapping[str, Any],
    settings: ProbeSettings,
    depths: Sequence[int],
    num_probes: int,
    max_samples: int,
    budget_s: float,
    device: torch.device,
    progress: Callable[[str], None],
    ways: Sequence[Way] = (TRAIN,),
    group: dist.ProcessGroup | None = None,
    only: str | None = None,
) -> Iterator[Measurement]:
    """Measurements of every module that the data uses; those of a module and way when all of them are taken.

    Args:
        family: Model family.
        shapes: Sampled data distribution; probe groups are drawn from it.
        token_config: Config entries that come from the tokenizer.
        settings: Identification and repeats.
        depths: Shallow depths to build.
        num_probes: Groups per module and way, at most.
        max_samples: Largest group in samples.
        budget_s: Time for the probes of all modules and ways together.
        device: Where to run.
        progress: Told once per module and way.
        ways: How every module is run.
        group: Tensor-parallel ranks that run one module together. All of them make the same call and yield rows of
            the same groups; the first one's choices and seconds count. Modules that so many cannot share are left out.
        only: A module, to leave out all others; it has its share of the budget, not theirs.

    Raises:
        DataError: there is no sample to draw groups from.
    """
    used = used_modules(family, shapes)
    share_s = budget_s / (len(used) * len(ways))
    specs = {spec.module: spec for spec in family.specs()}
    tp = 1 if group is None else group.size()
    for module in used if only is None else [m for m in used if m == only]:
        if tp not in specs[module].tp_choices:
            progress(f"{module}: {tp} tensor-parallel ranks cannot split it, skipped")
            continue
        for way in ways:
            probes = [
                ModuleProbe(family, token_config, module, n, settings, device, way=way, group=group) for n in depths
            ]
            groups = probe_groups(shapes, module, num_groups=num_probes, max_samples=max_samples, seed=settings.seed)
            sweeps = _Sweeps(probes, groups, share_s, group, settings.num_repeats)
            yield from sweeps.run()
            name = module if way == TRAIN else f"{module}, {way.name}"
            progress(f"{name}: {sweeps.summary()}")


def used_modules(family: Family, shapes: Sequence[SampleShape]) -> list[str]:
    """Modules with any work in `shapes`, in the family's order.

    Raises:
        DataError: there are none.
    """
    used = [m for m in family.modules if any(s.load(m).num_tokens for s in shapes)]
    if not used:
        raise DataError("no sample to profile the model with", hint="the dataset has no valid sample")
    return used


def num_runs(num_repeats: int) -> int:
    """Runs of a group at one depth: its repeats, and at each visit one more, untimed."""
    return num_repeats + min(num_repeats, 2)


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


class _Sweeps:
    """Probes of one module at all depths in one way: which group is next, when to stop, and what to time again."""

    def __init__(
        self, probes: Sequence[ModuleProbe], groups: Sequence[ProbeGroup], share_s: float,
        ranks: dist.ProcessGroup | None, num_repeats: int,
    ) -> None:  # fmt: skip
        self._probes, self._groups, self._share_s, self._ranks = probes, groups, share_s, ranks
        self._tokens = [group.load.num_tokens for group in groups]
        self._left = [*range(len(groups))]
        self._took_s: dict[int, float] = {}
        self._num_first = -(-num_repeats // 2)
        self._num_again = num_repeats - self._num_first
        self._first_sweep_s = share_s * (self._num_first + 1) / num_runs(num_repeats)
        self._num_rows = self._num_too_large = 0

    def run(self) -> list[Measurement]:
        """Rows of all groups; one that does not fit at some depth ends what is larger at every depth."""
        too_large = list(self._warm_up())
        started = time.perf_counter()
        visited: dict[int, GroupVisits] = {}
        while (index := self._agree(self._next(time.perf_counter() - started))) is not None:
            visited[index] = GroupVisits(self._probes, self._groups[index])
            visited[index].visit(self._num_first)
            self._note(index, visited[index].rows())
        for index, group in list(visited.items()) if self._num_again else []:
            visit_s = self._took_s.get(index, 0.0) * (self._num_again + 1)
            if not self._agree(time.perf_counter() - started + visit_s < self._share_s):
                break
            if group.fits:
                group.visit(self._num_again)
        return [*too_large, *(row for group in visited.values() for row in group.rows())]

    def summary(self) -> str:
        too_large = f", {self._num_too_large} out of memory" if self._num_too_large else ""
        return f"{self._num_rows} probes{too_large}"

    def _warm_up(self) -> Iterator[Measurement]:
        """The largest group that fits, once, so that every allocation has its size before anything is kept."""
        for probe in self._probes:
            for index in sorted(self._left, key=lambda i: -self._tokens[i]):
                if index not in self._left:  # as large as one that did not fit
                    continue
                too_large = probe.warm_up(self._groups[index])
                if too_large is None:
                    break
                yield too_large
                self._note(index, [too_large])

    def _next(self, elapsed_s: float) -> int | None:
        sizes = [self._tokens[i] for i in self._left]
        seconds = (self._num_first + 1) * self._expected_s(sizes)
        done = [self._tokens[i] for i in self._took_s]
        found = next_group(seconds.tolist(), sizes, done, self._first_sweep_s - elapsed_s)
        return None if found is None else self._left[found]

    def _expected_s(self, sizes: Sequence[int]) -> Floats:
        """Of one run at all depths: between what other sizes took, and by the tokens beyond the largest of them."""
        if not self._took_s:
            return np.zeros(len(sizes))
        tokens, took_s = np.array(sorted((self._tokens[i], s) for i, s in self._took_s.items())).T
        found: Floats = np.interp(sizes, tokens, took_s) * np.maximum(1.0, np.array(sizes) / tokens[-1])
        return found

    def _note(self, index: int, rows: Sequence[Measurement]) -> None:
        timed = [row for row in rows if row.status == "ok"]
        self._num_rows += len(timed)
        if len(timed) < len(rows):
            self._num_too_large += 1
            self._left = [i for i in self._left if self._tokens[i] < self._tokens[index]]
            return
        self._left.remove(index)
        self._took_s[index] = sum(row.forward_s + row.backward_s for row in timed)

    def _agree(self, choice: Choice) -> Choice:
        """The first rank's choice on every rank: they time differently and must still run the same groups."""
        if self._ranks is None:
            return choice
        shared = [choice]
        dist.broadcast_object_list(shared, group=self._ranks, group_src=0)
        return shared[0]
