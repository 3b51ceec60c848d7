"""Profile every module of a model within a time budget.

The budget is split over modules and depths. Probes stop when their share is spent, but never before each depth has
`MIN_PROBES` of them: a fit needs that many to tell its terms apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dflop.errors import DataError
from dflop.models.family import Family
from dflop.profile.groups import probe_groups
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.records import Measurement, SampleShape

MIN_PROBES = 8


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
) -> Iterator[Measurement]:
    """Measurements of every module that the data uses, as they are taken.

    Args:
        family: Model family.
        shapes: Sampled data distribution; probe groups are drawn from it.
        token_config: Config entries that come from the tokenizer.
        vocab_size: Rows of the embedding.
        settings: Identification and repeats.
        depths: Shallow depths to build.
        num_probes: Groups per module and depth.
        max_samples: Largest group in samples.
        budget_s: Time for the probes of all modules together.
        device: Where to run.
        progress: Told once per module and depth.

    Raises:
        DataError: there is no sample to draw groups from.
    """
    used = [m for m in family.modules if any(s.load(m).num_tokens for s in shapes)]
    if not used:
        raise DataError("no sample to profile the model with", hint="the dataset has no healthy sample")
    share_s = budget_s / (len(used) * len(depths))
    for module in used:
        groups = probe_groups(shapes, module, num_groups=num_probes, max_samples=max_samples, seed=settings.seed)
        for depth in depths:
            probe = ModuleProbe(family, token_config, vocab_size, module, depth, settings, device)
            limit = math.inf
            for group in sorted(groups, key=lambda g: -g.load.num_tokens):
                too_large = probe.warm_up(group)
                if too_large is None:
                    break
                yield too_large
                limit = group.load.num_tokens
            deadline, num_done = time.perf_counter() + share_s, 0
            for group in groups:
                if time.perf_counter() > deadline and num_done >= MIN_PROBES:
                    break
                if group.load.num_tokens >= limit:
                    continue
                yield probe.measure(group)
                num_done += 1
            progress(f"{module}, {depth} layer{'s' if depth > 1 else ''}: {num_done} of {len(groups)} probes")
