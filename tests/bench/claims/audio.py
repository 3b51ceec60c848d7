"""Models that listen."""

from __future__ import annotations

from collections.abc import Sequence

from dflop.jobs.suite.contest import DEFAULT, OURS, TUNED
from tests.bench.claims.contests import DEFAULT_CHARGED, FIXED, FIXED_CHARGED, PADDED, PADDED_CHARGED, TUNED_CHARGED
from tests.bench.claims.record import Claim, Expectation
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contest_task, contests, gain_over, memory_note, short_of
from tests.bench.claims.where import AUDIO_MODELS, Where

PAPER = 2.0
NAMES = (TUNED, TUNED_CHARGED, DEFAULT, DEFAULT_CHARGED, PADDED, PADDED_CHARGED, FIXED, FIXED_CHARGED)


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    return [contest_task(where) for where in _places(seeds, full)]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    outcomes = contests(found, _places(seeds, full))
    readings = {name: gain_over(outcomes, name) for name in NAMES}
    reached = [name for name in NAMES if readings[name].values and readings[name].mean >= PAPER]
    return Claim(
        "audio",
        "Audio models train 2 to 4 times as fast.",
        "Qwen2-Audio-7B" + (" and Qwen2.5-Omni-7B on sounds alone" if full else "") + ", 64 A100, 512 samples a step, "
        "clips of 1 to 300 s (generated; Qwen2-Audio hears the first 30 s), baselines as under `throughput`.",
        "2x to 4x (Fig. 9, secondary)",
        tuple(readings.values()),
        (Expectation(readings[TUNED], ">=", PAPER, short_of(outcomes, PAPER)),),
        (
            f"{PAPER:g}x and more over: {', '.join(reached) or 'none of the baselines'}",
            memory_note(outcomes),
        ),
        tuple(
            {
                "model": o.where.case.name, "seed": o.where.seed, "encoder_share": o.encoder_share,
                **{f"gain_over_{n}".replace(",", "").replace(" ", "_"): o.gain(n) for n in NAMES},
                "bound": o.bound_gain, "layout": o.layout.get(OURS, ""),
            }
            for o in outcomes
        ),
    )  # fmt: skip


def _places(seeds: Sequence[int], full: bool) -> list[Where]:
    models = AUDIO_MODELS if full else AUDIO_MODELS[:1]
    return [Where(model, "audio", seed) for model in models for seed in seeds]
