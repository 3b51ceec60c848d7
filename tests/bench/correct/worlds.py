"""Batches with predicted seconds, and truths that differ from the prediction.

One encoder of 0.43 billion parameters and an LLM of 8 billion, on made-up curves of seconds over tokens whose
efficiency grows with size; the encoder is scaled to 0.9 of the LLM's seconds, as a good plan has it. Sizes are
generated, with long texts and videos, or come from a table of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop.correct.buckets import bucket_edges, bucket_of
from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.items import Ints, module_items
from tests.bench.schedule.instances import bench_step

VISION = "vision"
MODULES = (VISION, LLM)
ENCODER_SHARE = 0.9
MAX_TOKENS = 32_768
TOKENS_PER_TILE, ROWS_PER_TILE, ROWS_PER_FRAME = 729, 196, 64
PEAK_FLOPS = 420e12


@dataclass(frozen=True)
class Batch:
    """One global batch: items of the LLM are its samples, those of the encoder are images and videos."""

    sample: Mapping[str, Ints]
    """Per module `[items]`, the sample each belongs to."""
    tokens: Mapping[str, Ints]
    """Per module `[items]`."""
    seconds: Mapping[str, Floats]
    """Per module `[items]`, predicted and uncorrected."""
    bucket: Mapping[str, Ints]
    """Per module `[items]`, the bucket of sizes."""

    def weights_s(self, factors: Mapping[str, Floats]) -> Floats:
        """`[samples, modules]` seconds under factors by bucket."""
        num = len(self.tokens[LLM])
        return np.stack(
            [np.bincount(self.sample[m], self.seconds[m] * factors[m][self.bucket[m]], num) for m in MODULES], axis=1
        )

    def expected_s(self, module: str, slot: Ints, num_slots: int, num_buckets: int) -> Floats:
        """`[slots, buckets]` uncorrected seconds where sample i runs in `slot[i]`."""
        place = slot[self.sample[module]] * num_buckets + self.bucket[module]
        return np.bincount(place, self.seconds[module], num_slots * num_buckets).reshape(num_slots, num_buckets)


class World:
    """Draws global batches.

    Args:
        num_samples: Of a global batch.
        seed: Of everything.
        sizes: Table of real sizes; None: generated ones.
    """

    def __init__(self, num_samples: int, seed: int, sizes: Path | None = None) -> None:
        self._num_samples, self._seed, self._sizes = num_samples, seed, sizes
        self._scale = 1.0
        probe = [self._items(-1 - i) for i in range(20)]
        tokens = {m: np.concatenate([t[m] for _, t in probe]) for m in MODULES}
        total_s = {m: predicted_s(m, tokens[m]).sum() for m in MODULES}
        self._scale = ENCODER_SHARE * float(total_s[LLM] / total_s[VISION])
        self.edges = {m: bucket_edges(t, predicted_s(m, t), np.ones(len(t))) for m, t in tokens.items()}

    def batch(self, step: int) -> Batch:
        """The same for all who ask."""
        sample, tokens = self._items(step)
        seconds = {m: predicted_s(m, tokens[m]) * (self._scale if m == VISION else 1.0) for m in MODULES}
        return Batch(sample, tokens, seconds, {m: bucket_of(tokens[m], self.edges[m]) for m in MODULES})

    def _items(self, step: int) -> tuple[dict[str, Ints], dict[str, Ints]]:
        """(sample of every item, its tokens) by module."""
        seed = 1000 * self._seed + step + 500
        if self._sizes:
            shapes = bench_step(
                2, "mild", self._num_samples, num_microbatches=1, num_ranks=1, seed=seed, sizes=self._sizes
            ).batch
            encoders = {item.module for shape in shapes for item in shape.items}
            named = {VISION: module_items(shapes, min(encoders)), LLM: module_items(shapes, LLM)}
            return {m: i.sample_of for m, i in named.items()}, {m: i.num_tokens for m, i in named.items()}
        return _generated(self._num_samples, np.random.default_rng(seed))


def predicted_s(module: str, tokens: Ints) -> Floats:
    """Seconds of each item, forward and backward."""
    u = tokens.astype(np.float64)
    if module == LLM:
        linear = 8 * 8e9 * u / (PEAK_FLOPS * 0.62 * u / (u + 200))
        return linear + 4 * u**2 * 4096 * 32 / (PEAK_FLOPS * 0.42)
    return 9.2 * u * 0.43e9 / (PEAK_FLOPS * 0.5 * u / (u + 500))


def _generated(num_samples: int, rng: np.random.Generator) -> tuple[dict[str, Ints], dict[str, Ints]]:
    """Half text, the rest images of 1 to 10 tiles and a few videos, none so long that it alone decides."""
    kind = rng.choice(3, num_samples, p=[0.5, 0.43, 0.07])
    text = np.clip(rng.lognormal(np.log(700), 1.0, num_samples), 200, MAX_TOKENS).astype(np.int64)
    tiles = rng.integers(1, 11, num_samples)
    frames = rng.integers(4, 25, num_samples)
    rows = np.where(kind == 1, ROWS_PER_TILE * tiles, np.where(kind == 2, ROWS_PER_FRAME * frames, 0))
    units = np.where(kind == 1, tiles, frames)
    with_media = np.flatnonzero(kind)
    return (
        {VISION: with_media, LLM: np.arange(num_samples)},
        {VISION: TOKENS_PER_TILE * units[with_media], LLM: np.minimum(text + rows, MAX_TOKENS)},
    )


@dataclass(frozen=True)
class Truth:
    """What a step really takes, relative to the prediction."""

    factors: Mapping[str, Floats]
    """By module, per bucket."""
    slowness: Floats
    """Per data-parallel rank of the LLM."""


Case = Callable[[int, World, int, int], Truth]
"""(step, world, ranks, seed) to the truth of that step."""


def _case(
    change: Callable[[dict[str, Floats], int, int], None] = lambda factors, step, seed: None, slow_rank: float = 1.0
) -> Case:
    def truth(step: int, world: World, num_ranks: int, seed: int) -> Truth:
        factors = {m: np.ones(len(e) + 1) for m, e in world.edges.items()}
        change(factors, step, seed)
        slowness = np.ones(num_ranks)
        slowness[1 % num_ranks] = slow_rank
        return Truth(factors, slowness)

    return truth


def _one_bucket(factors: dict[str, Floats], step: int, seed: int) -> None:
    factors[LLM][-4] = 2.0


def _encoder_top(factors: dict[str, Floats], step: int, seed: int) -> None:
    factors[VISION][-3:] = 2.0


def _global(factors: dict[str, Floats], step: int, seed: int) -> None:
    factors[LLM][:] = 1.5


def _drift(factors: dict[str, Floats], step: int, seed: int) -> None:
    factors[LLM][-4:] = 1.0 + 0.8 * min(step / 100, 1.0)


def _sudden(factors: dict[str, Floats], step: int, seed: int) -> None:
    factors[LLM][-4:] = 1.6 if step >= SUDDEN_STEP else 1.0


def _all_buckets(factors: dict[str, Floats], step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for m in MODULES:
        factors[m][:] = rng.lognormal(0.0, 0.25, len(factors[m]))


SUDDEN_STEP = 60
CASES: Mapping[str, Case] = {
    "right": _case(),
    "one LLM bucket 2x": _case(_one_bucket),
    "encoder top buckets 2x": _case(_encoder_top),
    "LLM 1.5x": _case(_global),
    "drift to 1.8x": _case(_drift),
    "sudden 1.6x": _case(_sudden),
    "all buckets lognormal .25": _case(_all_buckets),
    "slow rank 1.5x": _case(slow_rank=1.5),
    "bucket 2x and slow rank 1.5x": _case(_one_bucket, slow_rank=1.5),
}
