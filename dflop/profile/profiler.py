"""Profile every module of a model within a time budget.

The budget is split over modules and ways of running them. A group of samples is timed at every depth before the next
one is chosen, by `adaptive.Design` or in the order drawn. Choosing ends when the module is known well enough, when its
share of the budget is spent or all groups are done, but never before `MIN_GROUPS`: a fit needs that many to tell its
terms apart. So that these do not overrun the budget, groups are passed over that would take too much of what is left of
it (`affordable_s`), and where it is spent the cheapest ones make up the number.

Machines drift over seconds, and what is timed in a slow spell would make one shape look slow. So half of a group's
repeats, and the part of the budget that they need, are left for a second sweep over all groups after the choosing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dflop.errors import DataError
from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.adaptive import Design
from dflop.profile.groups import ProbeGroup, probe_groups, random_groups
from dflop.profile.probe import GroupVisits, ModuleProbe, ProbeSettings
from dflop.records import Measurement, SampleShape
from dflop.units import percent

MIN_GROUPS = 6
LARGEST_SHARE = 0.5
"""Of the time that is left: what one group may take while a fit lacks others. Costs of microbatches beyond the largest
group are extrapolated, so it gets more than the sixth that would be fair."""
POOL_FACTOR = 4
"""Groups to choose from per group that may be probed."""
NUM_TARGETS = 64
"""Microbatches drawn from the data that the choice shall predict well."""
Choice = TypeVar("Choice", int | None, bool)


def profile_model(
    family: Family,
    shapes: Sequence[SampleShape],
    *,
    token_config: Mapping[str, Any],
    vocab_size: int,
    settings: ProbeSettings,
    depths: Sequence[int],
    num_probes: int,
    max_samples: int,
    budget_s: float,
    device: torch.device,
    progress: Callable[[str], None],
    ways: Sequence[Way] = (TRAIN,),
    target_frac: float | None = 0.02,
    group: dist.ProcessGroup | None = None,
    only: str | None = None,
) -> Iterator[Measurement]:
    """Measurements of every module that the data uses; those of a module and way when all of them are taken.

    Args:
        family: Model family.
        shapes: Sampled data distribution; probe groups are drawn from it.
        token_config: Config entries that come from the tokenizer.
        vocab_size: Rows of the embedding.
        settings: Identification and repeats.
        depths: Shallow depths to build.
        num_probes: Groups per module and way, at most.
        max_samples: Largest group in samples.
        budget_s: Time for the probes of all modules and ways together.
        device: Where to run.
        progress: Told once per module and way.
        ways: How every module is run.
        target_frac: Probing of a module ends when its seconds are known to this relative uncertainty; None: all
            `num_probes` groups in the order drawn.
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
            progress(f"{module}: {tp} tensor-parallel ranks cannot share it, not probed")
            continue
        for way in ways:
            probes = [
                ModuleProbe(family, token_config, vocab_size, module, n, settings, device, way=way, group=group)
                for n in depths
            ]
            num_groups = num_probes if target_frac is None else POOL_FACTOR * num_probes
            groups = probe_groups(shapes, module, num_groups=num_groups, max_samples=max_samples, seed=settings.seed)
            targets = random_groups(shapes, module, NUM_TARGETS, max_samples=max_samples, seed=settings.seed)
            chooser = _Chooser(probes, groups, Design(
                depths, [[p.load(g) for p in probes] for g in groups], specs[module].num_layers,
                [g.load for g in targets],
            ), num_probes, share_s, target_frac, group, settings.num_repeats)  # fmt: skip
            yield from chooser.run()
            name = module if way == TRAIN else f"{module}, {way.name}"
            progress(f"{name}: {chooser.summary()}")


def used_modules(family: Family, shapes: Sequence[SampleShape]) -> list[str]:
    """Modules with any work in `shapes`, in the family's order.

    Raises:
        DataError: there are none.
    """
    used = [m for m in family.modules if any(s.load(m).num_tokens for s in shapes)]
    if not used:
        raise DataError("no sample to profile the model with", hint="the dataset has no healthy sample")
    return used


def num_runs(num_repeats: int) -> int:
    """Runs of a group at one depth: its repeats, and at each visit one more, untimed."""
    return num_repeats + min(num_repeats, 2)


def affordable_s(left_s: float, num_done: int) -> float:
    """Seconds that the next group may take.

    Args:
        left_s: Until the budget is spent; may be negative.
        num_done: Groups that were taken.
    """
    return max(left_s, 0.0) * (LARGEST_SHARE if num_done + 1 < MIN_GROUPS else 1.0)


class _Chooser:
    """Probes of one module at all depths in one way: which group is next, when to stop, and what to time again."""

    def __init__(
        self, probes: Sequence[ModuleProbe], groups: Sequence[ProbeGroup], design: Design, most: int, share_s: float,
        target_frac: float | None, ranks: dist.ProcessGroup | None, num_repeats: int,
    ) -> None:  # fmt: skip
        self._probes, self._groups, self._design = probes, groups, design
        self._most, self._share_s, self._target_frac, self._ranks = most, share_s, target_frac, ranks
        self._num_first = -(-num_repeats // 2)
        self._num_again = num_repeats - self._num_first
        self._choosing_s = share_s * (self._num_first + 1) / num_runs(num_repeats)
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
            visit_s = self._design.seconds_of(index) * (self._num_again + 1)
            if not self._agree(time.perf_counter() - started + visit_s < self._share_s):
                break
            if group.fits:
                group.visit(self._num_again)
        return [*too_large, *(row for group in visited.values() for row in group.rows())]

    def summary(self) -> str:
        too_large = f", {self._num_too_large} too large for the memory" if self._num_too_large else ""
        known = f", uncertain by {percent(self._design.uncertainty_frac)}" if self._design.num_taken else ""
        return f"{self._num_rows} probes{known}{too_large}"

    def _warm_up(self) -> Iterator[Measurement]:
        """The largest group that fits, once, so that every allocation has its size before anything is kept."""
        for probe in self._probes:
            for index in self._design.largest_first():
                too_large = probe.warm_up(self._groups[index])
                if too_large is None:
                    break
                yield too_large
                self._note(index, [too_large])

    def _next(self, elapsed_s: float) -> int | None:
        design, num_done = self._design, self._design.num_taken
        is_enough, left_s = num_done >= MIN_GROUPS, self._choosing_s - elapsed_s
        if num_done >= self._most or (is_enough and left_s < 0):
            return None
        if self._target_frac is not None and is_enough and design.uncertainty_frac < self._target_frac:
            return None
        limit_s = affordable_s(left_s, num_done) / (self._num_first + 1)
        index = design.first(limit_s) if self._target_frac is None else design.next(limit_s)
        return design.cheapest() if index is None and not is_enough else index

    def _note(self, index: int, rows: Sequence[Measurement]) -> None:
        timed = [row for row in rows if row.status == "ok"]
        self._num_rows += len(timed)
        if len(timed) < len(rows):
            self._num_too_large += 1
            self._design.drop(self._design.num_tokens[index])
            return
        seconds = [row.forward_s + row.backward_s for row in timed]
        noise_frac = max(_standard_error(row) / s for row, s in zip(timed, seconds, strict=True))
        self._design.take(index, seconds, noise_frac)

    def _agree(self, choice: Choice) -> Choice:
        """The first rank's choice on every rank: they time differently and must still run the same groups."""
        if self._ranks is None:
            return choice
        shared = [choice]
        dist.broadcast_object_list(shared, group=self._ranks, group_src=0)
        return shared[0]


def _standard_error(row: Measurement) -> float:
    """Of the medians: 1.25 standard deviations / sqrt(n), the standard deviation being 1.48 half ranges (normal)."""
    return 1.25 * 1.48 * (row.forward_spread_s + row.backward_spread_s) / math.sqrt(row.num_repeats)
