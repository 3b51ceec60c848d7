"""Which global batch each step trains on, under which policy, and in which stage of training.

Training takes the batches in order. Stages share its steps out: each has its own frozen modules and learning rate, and
a job runs to the end of the stage it begins in, as the next one wants a plan of its own. The comparison trains the
first few batches under every policy, taking turns at which comes first, so that slow drifts of the machine fall on all
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.config import Config
from dflop.data.sample_order import SampleOrder
from dflop.records import SampleShape

TRAIN, COMPARE = "train", "compare"
QUICK = "quick"
"""Policy of a plan for which there was no time: longest first, no search."""
WARMUP = "warmup"
"""Policy name in the records of steps that do not count."""
NUM_WARMUP_STEPS = 2
"""First steps of a comparison, not counted: lazy initialisation and page faults."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of a job."""

    batch_step: int
    """Step of the data order whose global batch is used."""
    policy: str
    label: str
    """Policy name in the records; empty keeps the scheduler's."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of training: steps `[first_step, end_step)` with modules that do not train and a learning rate."""

    index: int
    name: str
    first_step: int
    end_step: int
    frozen: tuple[str, ...]
    """Modules, or `<encoder>.tower` for an encoder whose projector trains."""
    learning_rate: float

    @property
    def num_steps(self) -> int:
        return self.end_step - self.first_step


def stages_of(config: Config) -> tuple[Stage, ...]:
    """Stages in order; a configuration without any has one, named `train`."""
    settings = config.train
    if not config.stages:
        return (Stage(0, "train", 0, settings.num_steps, config.model.frozen, settings.learning_rate),)
    found: list[Stage] = []
    for index, given in enumerate(config.stages):
        first = found[-1].end_step if found else 0
        end = settings.num_steps if given.num_steps is None else first + given.num_steps
        rate = given.learning_rate or settings.learning_rate
        found.append(Stage(index, given.name, first, end, given.frozen, rate))
    return tuple(found)


def stage_at(config: Config, step: int) -> Stage:
    """The stage that a step belongs to: at a boundary the later one, behind the last step the last one."""
    stages = stages_of(config)
    return next((stage for stage in stages if step < stage.end_step), stages[-1])


def stage_of_job(config: Config, mode: str, next_step: int) -> Stage:
    """The stage of a job that begins now: where the newest checkpoint ends, of a comparison the last."""
    return stage_at(config, next_step) if mode == TRAIN else stages_of(config)[-1]


def profiled_ways(config: Config) -> tuple[str, ...]:
    """Ways in which modules are profiled: those that the configuration names and, if a stage freezes any, `frozen`."""
    ways = config.model_profile.ways
    needs_frozen = "frozen" not in ways and any(stage.frozen for stage in stages_of(config))
    return (*ways, "frozen") if needs_frozen else ways


def job_steps(config: Config, mode: str, stage: Stage | None = None) -> tuple[StepSpec, ...]:
    """Steps of the `train` job, to the end of a stage or (None) of training, or of the `compare` job."""
    if mode == TRAIN:
        end = config.train.num_steps if stage is None else stage.end_step
        return tuple(StepSpec(t, "balanced", "") for t in range(end))
    steps = [StepSpec(t, "balanced", WARMUP) for t in range(NUM_WARMUP_STEPS)]
    policies = ("arrival", *config.compare.baselines, "balanced")
    for turn in range(config.compare.num_batches * config.compare.num_repeats):
        repeat, batch = divmod(turn, config.compare.num_batches)
        first = (batch + repeat) % len(policies)
        steps += [StepSpec(batch, p, p) for p in policies[first:] + policies[:first]]
    return tuple(steps)


class GlobalBatches:
    """Samples of the global batches of a run."""

    def __init__(self, config: Config, shapes: Sequence[SampleShape]) -> None:
        self._shapes = shapes
        weights = np.array([s.weight for s in shapes])
        size, window = config.plan.global_batch_size, config.dataset.shuffle_window
        self._order = SampleOrder(config.train.seed, len(shapes), size, weights, window=window)

    def at(self, batch_step: int) -> list[SampleShape]:
        """Samples of one global batch in arrival order."""
        return [self._shapes[i] for i in self._order.batch(batch_step)]
