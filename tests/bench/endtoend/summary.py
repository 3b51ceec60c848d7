"""All seeds of a case together: how much faster dflop is than a data-blind arm, and when it has paid for itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.endtoend.arms import OURS
from tests.bench.endtoend.paired import Ratio, break_even_steps, over_seeds, seed_ratio

Seed = Mapping[str, Any]
"""As `outcome.figures` gives it."""


@dataclass(frozen=True)
class Side:
    """One arm, means over steps and seeds."""

    layouts: tuple[str, ...]
    """Every one that a seed had."""
    step_s: float
    tokens_per_s: float
    idle_frac: float
    peak_bytes: float
    """All ranks together."""


@dataclass(frozen=True)
class Summary:
    """One data-blind arm against dflop, on the same batches."""

    data: str
    num_processes: int
    against: str
    measured: Ratio
    of_seed: tuple[float, ...]
    simulated: float
    """Beforehand."""
    cpu: Ratio
    """Of the processor seconds of all processes of an arm, the scheduler's too."""
    blind: Side
    ours: Side
    num_steps: int
    """Counted, all seeds."""
    num_quick_plans: int
    setup_s: float
    """Profiles and plan, a seed's mean."""
    break_even: int | None
    """Steps until that is saved again; None: never."""


def summaries(seeds: Sequence[Seed]) -> Iterator[Summary]:
    """Per data, number of processes and data-blind arm; seeds in which there is no such plan do not count."""
    cases = dict.fromkeys((s["data"], s["num_processes"]) for s in seeds)
    for data, num_processes in cases:
        of_case = [s for s in seeds if (s["data"], s["num_processes"]) == (data, num_processes)]
        for against in dict.fromkeys(name for s in of_case for name in s["arms"] if name != OURS):
            yield _summary(data, num_processes, against, [s for s in of_case if against in s["arms"]])


def _summary(data: str, num_processes: int, against: str, seeds: Sequence[Seed]) -> Summary:
    def ratios(what: str) -> list[float]:
        return [seed_ratio(s["arms"][against][what], s["arms"][OURS][what]) for s in seeds]

    blind, ours = _side(seeds, against), _side(seeds, OURS)
    measured = ratios("step_s")
    setup_s = statistics.fmean(sum(s["setup"].values()) for s in seeds)
    return Summary(
        data,
        num_processes,
        against,
        measured=over_seeds(measured),
        of_seed=tuple(measured),
        simulated=over_seeds(ratios("simulated_s")).mean,
        cpu=over_seeds(ratios("cpu_s")),
        blind=blind,
        ours=ours,
        num_steps=sum(len(s["num_llm_tokens"]) for s in seeds),
        num_quick_plans=sum(s["arms"][OURS]["num_quick_plans"] for s in seeds),
        setup_s=setup_s,
        break_even=break_even_steps(setup_s, blind.step_s, ours.step_s),
    )


def _side(seeds: Sequence[Seed], name: str) -> Side:
    arms = [s["arms"][name] for s in seeds]
    step_s = [seconds for arm in arms for seconds in arm["step_s"]]
    num_tokens = sum(sum(s["num_llm_tokens"]) for s in seeds)
    return Side(
        layouts=tuple(dict.fromkeys(f"{a['plan']['layout']}, {a['plan']['num_microbatches']} mb" for a in arms)),
        step_s=statistics.fmean(step_s),
        tokens_per_s=num_tokens / sum(step_s),
        idle_frac=statistics.fmean(frac for arm in arms for frac in arm["idle_frac"]),
        peak_bytes=statistics.fmean(sum(arm["peak_bytes"]) for arm in arms),
    )
