"""Is the gain largest where encoder and LLM have about the same work?"""

from __future__ import annotations

from collections.abc import Sequence

from dflop.jobs.suite.contest import BATCHES, OURS, TUNED
from tests.bench.claims.contests import TUNED_CHARGED, Outcome
from tests.bench.claims.record import Claim, Expectation, Reading, by_seed
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contest_task, contests
from tests.bench.claims.where import SIGLIP_7B, Where

FACTORS, QUICK_FACTORS = (0.25, 1.0, 2.5, 5.4, 12.0, 32.0), (1.0, 5.4, 32.0)
"""5.4 makes encoder and LLM about equal."""
EQUAL = 0.5
ALIKE = 0.98
"""A gain within this part of the largest is as large."""


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    return [contest_task(_place(factor, seed)) for factor in _factors(full) for seed in seeds]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    points = [contests(found, [_place(f, s) for s in seeds]) for f in _factors(full)]
    points = [of for of in points if of]
    shares = [sum(o.encoder_share for o in of) / len(of) for of in points]
    equal = min(range(len(points)), key=lambda i: abs(shares[i] - EQUAL))
    peak = max(range(len(points)), key=lambda i: _mean(points[i]))
    relative = Reading(
        f"gain at an encoder share of {shares[equal]:.0%} / largest gain of any share",
        tuple(_at(points[equal], s) / max(_at(of, s) for of in points) for s in _seeds(points)), "x", "simulated",
    )  # fmt: skip
    at_equal = Reading(f"gain at {shares[equal]:.0%}", _gain(points[equal]), "x", "simulated")
    at_peak = Reading(f"largest, at {shares[peak]:.0%}", _gain(points[peak]), "x", "simulated")
    return Claim(
        "balance",
        "The gain is largest where encoder and LLM have about the same work.",
        "SigLIP + Qwen2.5-7B, the mixture `main`, 64 A100, the encoder's costs multiplied; gain over uniform tuned at "
        "every share of the encoder in all GPU-seconds.",
        "largest at about equal loads (Fig. 8, secondary)",
        (relative, at_equal, at_peak),
        (Expectation(relative, ">=", ALIKE, reason(shares, [_mean(of) for of in points], points[peak])),),
        ("by encoder share: " + ", ".join(f"{s:.0%} {_mean(of):.2f}x" for s, of in zip(shares, points, strict=True)),),
        tuple(
            {
                "encoder_factor": o.where.encoder_factor, "seed": o.where.seed, "encoder_share": o.encoder_share,
                "gain": o.gain(TUNED), "gain_over_charged": o.gain(TUNED_CHARGED),
                "gain_by_order_alone": o.gain(TUNED, BATCHES), "bound": o.bound_gain,
                "idle_tuned": o.idle_frac[TUNED], "idle_ours": o.idle_frac[OURS], "layout": o.layout.get(OURS, ""),
            }
            for of in points
            for o in of
        ),
    )  # fmt: skip


def reason(shares: Sequence[float], gains: Sequence[float], peak: Sequence[Outcome]) -> str:
    """Where the peak is instead, and what kind of plan has it."""
    best = max(range(len(gains)), key=gains.__getitem__)
    at_end = "at an end of the range" if best in (0, len(gains) - 1) else "inside the range"
    inline = sum(o.layout.get(OURS, "").startswith("inline") for o in peak)
    told = f"the largest gain is at {shares[best]:.0%}, {at_end}"
    if 2 * inline >= len(peak):
        return (
            f"{told}; our plan there is inline ({inline} of {len(peak)} seeds): every rank holds encoder and LLM, so "
            "the balance of the two does not matter to it"
        )
    return f"{told}; our plan there gives modules ranks of their own"


def _factors(full: bool) -> tuple[float, ...]:
    return FACTORS if full else QUICK_FACTORS


def _place(factor: float, seed: int) -> Where:
    return Where(SIGLIP_7B, "main", seed, encoder_factor=factor)


def _seeds(points: Sequence[Sequence[Outcome]]) -> list[int]:
    """Seeds that have a plan everywhere."""
    return sorted(set.intersection(*({o.where.seed for o in of} for of in points)))


def _at(outcomes: Sequence[Outcome], seed: int) -> float:
    return next(o.gain(TUNED) for o in outcomes if o.where.seed == seed)


def _gain(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    return by_seed([(o.where.seed, o.gain(TUNED)) for o in outcomes])


def _mean(outcomes: Sequence[Outcome]) -> float:
    values = _gain(outcomes)
    return sum(values) / len(values)
