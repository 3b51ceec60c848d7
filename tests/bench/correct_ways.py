"""Ways of correcting predictions, dflop's and obvious ones, in a simulated world whose truth is known.

Batches of half texts, the rest pictures and a few videos, are on made-up curves of seconds over tokens whose efficiency
grows with size; the encoder is scaled to 0.9 of the LLM's seconds, as a good plan has it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.buckets import bucket_edges, bucket_of
from dflop.correct.estimate import Estimator
from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.items import Ints
from tests.correct.times import StageTime, as_arrays

VISION = "vision"
MODULES = (VISION, LLM)
NUM_SAMPLES, NUM_SLOTS, NUM_RANKS = 256, 32, 4
ENCODER_SHARE, PEAK_FLOPS, MAX_TOKENS = 0.9, 420e12, 32_768
MAX_ROUNDS = 200
SMOOTHING, DEAD_ZONE = 0.15, 0.03
Times = Sequence[tuple[int, StageTime]]
"""(slot, time) of one step."""


@dataclass(frozen=True)
class Batch:
    """One global batch by module: items of the LLM are its samples, those of the encoder are pictures and videos."""

    sample: Mapping[str, Ints]
    """The sample that each item belongs to."""
    tokens: Mapping[str, Ints]
    seconds: Mapping[str, Floats]
    """Predicted and uncorrected."""
    bucket: Mapping[str, Ints]
    """Of sizes."""

    def weights_s(self, factors: Mapping[str, Floats]) -> Floats:
        """`[samples, modules]` seconds under factors by bucket."""
        parts = (
            np.bincount(self.sample[m], self.seconds[m] * factors[m][self.bucket[m]], NUM_SAMPLES) for m in MODULES
        )
        return np.stack(list(parts), axis=1)

    def expected_s(self, module: str, slot: Ints, num_buckets: int) -> Floats:
        """`[slots, buckets]` uncorrected seconds where sample i runs in `slot[i]`."""
        place = slot[self.sample[module]] * num_buckets + self.bucket[module]
        return np.bincount(place, self.seconds[module], NUM_SLOTS * num_buckets).reshape(NUM_SLOTS, num_buckets)


class World:
    """Draws global batches."""

    def __init__(self, seed: int) -> None:
        self._seed, self._scale = seed, 1.0
        probe = [self._items(-1 - i)[1] for i in range(20)]
        tokens = {m: np.concatenate([t[m] for t in probe]) for m in MODULES}
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
        rng, n = np.random.default_rng(1000 * self._seed + step + 500), NUM_SAMPLES
        kind = rng.choice(3, n, p=[0.5, 0.43, 0.07])
        text = np.clip(rng.lognormal(np.log(700), 1.0, n), 200, MAX_TOKENS).astype(np.int64)
        tiles, frames = rng.integers(1, 11, n), rng.integers(4, 25, n)
        rows = np.where(kind == 1, 196 * tiles, np.where(kind == 2, 64 * frames, 0))
        seen = np.flatnonzero(kind)
        return (
            {VISION: seen, LLM: np.arange(n)},
            {VISION: 729 * np.where(kind == 1, tiles, frames)[seen], LLM: np.minimum(text + rows, MAX_TOKENS)},
        )


def predicted_s(module: str, tokens: Ints) -> Floats:
    """Seconds of each item, forward and backward: an encoder of 0.43 billion parameters, an LLM of 8 billion."""
    u = tokens.astype(np.float64)
    if module == LLM:
        linear = 8 * 8e9 * u / (PEAK_FLOPS * 0.62 * u / (u + 200))
        return linear + 4 * u**2 * 4096 * 32 / (PEAK_FLOPS * 0.42)
    return 9.2 * u * 0.43e9 / (PEAK_FLOPS * 0.5 * u / (u + 500))


def pace(slowness: Floats) -> Floats:
    """`[slots, modules]`: slot b runs on LLM rank `b % ranks`."""
    return np.stack([np.ones(NUM_SLOTS), slowness[np.arange(NUM_SLOTS) % NUM_RANKS]], axis=1)


def slot_loads(weights_s: Floats, slot: Ints, slowness: Floats) -> Floats:
    """`[slots, modules]` seconds."""
    return np.stack([np.bincount(slot, w, NUM_SLOTS) for w in weights_s.T], axis=1) * pace(slowness)


def height_s(weights_s: Floats, slot: Ints, slowness: Floats) -> float:
    """Seconds of the slowest slot."""
    return float(slot_loads(weights_s, slot, slowness).max())


def balanced(weights_s: Floats, slowness: Floats) -> Ints:
    """Slot of every sample: longest first to the slot that stays lowest, then swaps and moves out of the slowest slot.

    These end when none lowers it.
    """
    speed, loads, slot = pace(slowness), np.zeros((NUM_SLOTS, 2)), np.zeros(len(weights_s), dtype=np.int64)
    for i in np.argsort(-weights_s.sum(axis=1), kind="stable"):
        slot[i] = ((loads + weights_s[i]) * speed).max(axis=1).argmin()
        loads[slot[i]] += weights_s[i]
    weights_s = np.concatenate([weights_s, np.zeros((NUM_SLOTS, 2))])
    slot = np.concatenate([slot, np.arange(NUM_SLOTS)])  # nothing, in every slot: swapping with it is a move
    for _ in range(MAX_ROUNDS):
        heights = (loads * speed).max(axis=1)
        worst = int(heights.argmax())
        inside, outside = np.flatnonzero(slot == worst), np.flatnonzero(slot != worst)
        change = weights_s[inside][:, None] - weights_s[outside][None]
        here = ((loads[worst] - change) * speed[worst]).max(axis=2)
        there = ((loads[slot[outside]][None] + change) * speed[slot[outside]][None]).max(axis=2)
        after = np.maximum(here, there)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= heights[worst] * (1 - 1e-9):
            break
        loads[worst] -= change[i, j]
        loads[slot[outside[j]]] += change[i, j]
        slot[inside[i]], slot[outside[j]] = slot[outside[j]], worst
    return slot[:-NUM_SLOTS]


class Uncorrected:
    """Believes the prediction. Contenders know the world's buckets and ranks, and see only times."""

    is_on = False
    """Whether its plans depend on factors by size."""

    def __init__(self, world: World) -> None:
        self._factors = {m: np.ones(len(world.edges[m]) + 1) for m in MODULES}

    def plan(self, batch: Batch) -> Ints:
        """Slot of every sample of the next step."""
        return balanced(batch.weights_s(self._factors), np.ones(NUM_RANKS))

    def learn(self, times: Times) -> None:
        """From the step that was planned last."""


class ModuleAverage(Uncorrected):
    """One factor per module: exponential average of a step's median log ratio, with a dead zone."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._log, self._num_steps = dict.fromkeys(MODULES, 0.0), 0

    def learn(self, times: Times) -> None:
        self._num_steps += 1
        for m in MODULES:
            log = np.median([math.log(t.measured_s / t.expected_s[m].sum()) for _, t in times if m in t.expected_s])
            self._log[m] += max(1 / (self._num_steps + 1), SMOOTHING) * (log - self._log[m])
            if abs(self._log[m] - math.log(self._factors[m][0])) > math.log1p(DEAD_ZONE):
                self._factors[m][:] = math.exp(self._log[m])


class BucketAverage(Uncorrected):
    """A factor per bucket: exponential average of the ratios of the microbatches it was in, by its share of them."""

    is_on = True

    def learn(self, times: Times) -> None:
        for m in MODULES:
            seen = [t for _, t in times if m in t.expected_s]
            parts = np.array([t.expected_s[m] for t in seen]) * self._factors[m]
            ratio = np.array([t.measured_s for t in seen]) / parts.sum(axis=1)
            share = (parts.T / parts.sum(axis=1)).T
            weight = share.sum(axis=0)
            seen_ratio = np.where(weight > 0, ratio @ share / np.where(weight > 0, weight, 1.0), 1.0)
            self._factors[m] *= 1 + SMOOTHING * (seen_ratio - 1)


class Estimated(Uncorrected):
    """dflop's estimator."""

    def __init__(self, world: World) -> None:
        self._estimator = Estimator(world.edges)
        self.is_on = False

    def plan(self, batch: Batch) -> Ints:
        factors = self._estimator.factors()
        found, nodes = factors.by_module(), factors.by_node()
        self.is_on = any(set(found[m].factors) != {found[m].level} for m in MODULES)
        slow = np.array([nodes.get((LLM, 0, rank), 1.0) for rank in range(NUM_RANKS)])
        return balanced(batch.weights_s({m: np.array(found[m].factors) for m in MODULES}), slow)

    def learn(self, times: Times) -> None:
        self._estimator.observe(as_arrays(time for _, time in times))
