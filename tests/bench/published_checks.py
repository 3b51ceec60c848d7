"""How far predictions of published runs are off, by kind of run, by laboratory, and as choices between layouts."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflop.cost.curve import Floats
from tests.bench.published_runs import PublicRun

MIN_DIFFERENCE = 0.05
"""Runs of a pair differ by more than that, relative; closer ones are no choice."""


class Choice(NamedTuple):
    """Two runs of one model on one kind of device, by one laboratory."""

    measured: float
    """Seconds of a token of the slower run over those of the faster one."""
    predicted: float

    @property
    def is_right(self) -> bool:
        """Whether the faster run is predicted to be the faster one."""
        return self.predicted > 1.0


def kinds(runs: Sequence[PublicRun]) -> Mapping[str, list[bool]]:
    """Which runs are of a kind: a device, tensor parallelism, pipelines, compiled or eager on data-parallel ranks."""
    found = {d: [r.device.startswith(d) for r in runs] for d in sorted({r.device.partition("-")[0] for r in runs})}
    flat = [r.tp == r.pp == 1 for r in runs]
    found |= {"tp > 1": [r.tp > 1 and r.pp == 1 for r in runs], "pp > 1": [r.pp > 1 for r in runs]}
    for name, word in (("compiled", "yes"), ("eager", "no")):
        found[f"{name}, tp 1"] = [is_flat and r.compile == word for is_flat, r in zip(flat, runs, strict=True)]
    return {name: chosen for name, chosen in found.items() if any(chosen)}


def choices(runs: Sequence[PublicRun], predicted_s: Floats) -> list[Choice]:
    """Every pair of runs that differ by more than `MIN_DIFFERENCE`.

    Args:
        runs: Of any laboratories, models and devices; pairs are of one of each, with sequences of one length.
        predicted_s: GPU-seconds of a token, per run.
    """
    found = []
    for (one, one_s), (other, other_s) in itertools.combinations(zip(runs, predicted_s.tolist(), strict=True), 2):
        if any(of(one) != of(other) for of in (lambda r: r.laboratory, lambda r: (r.device, r.model, r.seq_len))):
            continue
        ratio = other.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu
        if max(ratio, 1 / ratio) > 1 + MIN_DIFFERENCE:
            found.append(Choice(ratio, one_s / other_s) if ratio > 1 else Choice(1 / ratio, other_s / one_s))
    return found


def check_lines(runs: Sequence[PublicRun], errors: Floats, unseen: Floats) -> Iterator[str]:
    """A line for all runs, per kind and per laboratory, and two for choices.

    Args:
        runs: The runs.
        errors: Predicted over measured seconds, less one.
        unseen: The same by fits that saw no run of the laboratory.
    """
    yield f"all: {spread(errors)}; unseen: {spread(unseen)}"
    of_lab = {lab: [r.laboratory == lab for r in runs] for lab in dict.fromkeys(r.laboratory for r in runs)}
    for name, chosen in {**kinds(runs), **of_lab}.items():
        yield f"{name}: {spread(errors[chosen])}; unseen: {spread(unseen[chosen])}"
    measured_s = np.array([1 / run.tokens_per_s_per_gpu for run in runs])
    for name, of in (("choices", errors), ("choices, unseen", unseen)):
        if found := choices(runs, (1 + of) * measured_s):
            off = [abs(choice.predicted / choice.measured - 1) for choice in found]
            right = sum(choice.is_right for choice in found) / len(found)
            yield f"{name}: {len(found)} pairs, the faster one right in {right:.0%}, ratio off by {np.median(off):.1%}"


def spread(errors: Floats) -> str:
    """Median, 90 % and bias of errors."""
    off = np.abs(errors)
    return (
        f"{len(off)} runs, error {np.median(off):.1%} (median), {np.quantile(off, 0.9):.1%} (90 % of runs), "
        f"bias {np.mean(errors):+.1%}"
    )
