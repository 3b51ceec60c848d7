"""Profile every module of a model within a time budget, which is split over modules and ways of running them.

A group of samples is timed at every depth before the next one of `groups.probe_groups`; `sweeps.py` says which that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.groups import probe_groups, used_modules
from dflop.profile.probe import GroupVisits, ModuleProbe, ProbeSettings
from dflop.profile.sweeps import Visit, sweep
from dflop.profile.timing import of_first_rank
from dflop.progress import At, unseen
from dflop.records import Measurement, SampleShape


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
    at: At = unseen,
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
        progress: Called once per module and way, with a line.
        at: Receives the seconds of the budget that are spent.
        ways: How every module is run.
        group: Tensor-parallel ranks that run one module together. All of them make the same call and yield rows of
            the same groups; the first one's choices and seconds count. Modules that so many cannot share are left out.
        only: A module, to leave out all others; it has its share of the budget, not theirs.

    Raises:
        DataError: there is no sample to draw groups from.
    """
    used = used_modules(family, shapes)
    share_s = budget_s / (len(used) * len(ways))
    tp = 1 if group is None else group.size()
    chosen = [s for s in used if only in (None, s.module)]
    for spec in chosen:
        if tp not in spec.tp_choices:
            progress(f"{spec.module}: {tp} tensor-parallel ranks cannot split it, skipped")
    parts = [(spec.module, way) for spec in chosen if tp in spec.tp_choices for way in ways]
    for number, (module, way) in enumerate(parts):
        deep = family.probe_depths(module, depths)
        probes = [ModuleProbe(family, token_config, module, n, settings, device, way=way, group=group) for n in deep]
        drawn = probe_groups(shapes, module, num_groups=num_probes, max_samples=max_samples, seed=settings.seed)
        groups = [GroupVisits(probes, g) for g in drawn]
        sizes = [g.load.num_tokens for g in drawn]
        visit = _reported(partial(_visit, groups, group), at, number, len(parts), share_s)
        sweep(sizes, share_s, settings.num_repeats, visit)
        rows = [row for visits in groups for row in visits.rows()]
        yield from rows
        name = module if way == TRAIN else f"{module}, {way.name}"
        num_too_large = sum(row.status == "oom" for row in rows)
        too_large = f", {num_too_large} out of memory" if num_too_large else ""
        progress(f"{name}: {len(rows) - num_too_large} probes{too_large}")


def _reported(visit: Visit, at: At, part: int, num_parts: int, share_s: float) -> Visit:
    """The visits of one part of so many; `at` is called with the seconds of all shares that are spent after each."""
    what, started, total_s = "profiling, seconds of the budget", time.perf_counter(), round(num_parts * share_s)
    at(what, round(part * share_s), total_s)

    def reported(index: int, num_timed: int) -> float | None:
        took_s = visit(index, num_timed)
        at(what, round(part * share_s + min(share_s, time.perf_counter() - started)), total_s)
        return took_s

    return reported


def _visit(groups: Sequence[GroupVisits], ranks: dist.ProcessGroup | None, index: int, num_timed: int) -> float | None:
    """As `sweeps.Visit`; the first rank's seconds, since ranks time differently and must still run the same groups."""
    started = time.perf_counter()
    groups[index].visit(num_timed)
    return of_first_rank(time.perf_counter() - started, ranks) if groups[index].fits else None
