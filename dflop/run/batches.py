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
from dflop.data.holdout import held_out, sources_held_out
from dflop.data.sample_order import SampleOrder
from dflop.errors import DataError
from dflop.records import SampleShape
from dflop.run.directory import dataset_ref

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
    """Ways in which modules are profiled: those that the configuration names, and `frozen`.

    This one if a stage freezes any, or adapters train in their place.
    """
    ways = config.model_profile.ways
    freezes = config.train.lora is not None or any(stage.frozen for stage in stages_of(config))
    needs_frozen = "frozen" not in ways and freezes
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
    """Samples of the global batches of a run, and of those that it validates on.

    Raises:
        DataError: no sample can be held out, or not even one global batch is left to train on.
    """

    def __init__(self, config: Config, shapes: Sequence[SampleShape]) -> None:
        size, window = config.plan.global_batch_size, config.dataset.shuffle_window
        self._shapes, validated = shapes, list[SampleShape]()
        if config.validation.is_wanted:
            out = _held_out(config, shapes)
            validated = [shapes[p] for p in sorted(out)]
            self._shapes = [shape for p, shape in enumerate(shapes) if p not in out]
            _check(config, len(validated), len(self._shapes))
        self.validated = [validated[i : i + size] for i in range(0, len(validated), size)]
        """Samples that are held out of training, as global batches."""
        weights = np.array([s.weight for s in self._shapes])
        self._order = SampleOrder(config.train.seed, len(self._shapes), size, weights, window=window)
        if num_kept := config.train.overfit_samples:  # of the first steps
            self._shapes = [self._shapes[p] for p in dict.fromkeys(self._order.epoch(0)[:num_kept].tolist())]
            self._order = SampleOrder(config.train.seed, len(self._shapes), size)

    def at(self, batch_step: int) -> list[SampleShape]:
        """Samples of one global batch in arrival order."""
        return [self._shapes[i] for i in self._order.batch(batch_step)]


def _held_out(config: Config, shapes: Sequence[SampleShape]) -> set[int]:
    if names := config.validation.sources:
        return set(sources_held_out(dataset_ref(config).open(), shapes, names).tolist())
    return set(held_out(shapes, config.validation.num_samples, config.train.seed).tolist())


def _check(config: Config, num_held_out: int, num_left: int) -> None:
    batch_size, num_wanted = config.plan.global_batch_size, config.validation.num_samples
    where = "validation.sources" if config.validation.sources else "validation.num_samples"
    if not num_held_out:
        raise DataError(
            f"of {num_left} samples none can be held out: more than {num_wanted} have the same media, or carry no loss",
            where=where, hint=f"more than {num_wanted}, or 0 for no validation",
        )  # fmt: skip
    if num_left < batch_size:
        raise DataError(
            f"{num_held_out} samples are held out and {num_left} left: less than a global batch of {batch_size}",
            where=where, hint=f"at most {max(0, num_held_out + num_left - batch_size)} samples, or more data",
        )  # fmt: skip
