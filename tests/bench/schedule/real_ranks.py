"""What the processes of the real steps do: profile a model, train its stages with the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dflop.jobs.submit import CPU_ENV
from dflop.models.build import build_model
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.links import profile_links
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import SampleShape, StepObservation, StepPlan
from tests.bench.profile.cases import VOCAB_SIZE
from tests.bench.schedule.real_cases import ENCODER_LAYERS, TOKEN_ID, Case, Source, family_of
from tests.bench.simulate.measure import CPU, DEPTHS, EngineRank, Profiled, take_core

NUM_PROBES, MAX_SAMPLES, NUM_REPEATS, LINKS_BUDGET_S = 24, 16, 5, 2.0
NUM_WARM_UP_STEPS = 6
"""Uncounted: first steps are slower by what their heap grows."""


@dataclass(frozen=True)
class Job:
    """Steps of one case in the order they are trained, each with the samples of its global batch."""

    case: Case
    step_plans: tuple[StepPlan, ...]
    shapes: tuple[SampleShape, ...]
    """Of all batches; `StepPlan.sample_index` names them."""
    num_rounds: int
    """How often all steps are trained and counted."""


def prepare_process(rank: int) -> None:
    """A core of its own, and memory that is set up as in a run.

    Raises:
        RuntimeError: this process was started without the environment of a run, so its seconds would mislead.
    """
    if CPU_ENV.items() - os.environ.items():
        raise RuntimeError(f"start the bench with {' '.join(f'{k}={v}' for k, v in CPU_ENV.items())}")
    take_core(rank)


def profile(rank: int, folder: Path, shapes: dict[str, list[SampleShape]], budget_s: float) -> Profiled:
    """Probes of one model per rank, beside each other as training runs, and of the link between them."""
    prepare_process(rank)
    model = list(ENCODER_LAYERS)[rank]
    family, hardware, software = family_of(model), hardware_name("cpu"), software_name()
    probes = list(
        profile_model(
            family, shapes[model], token_config=family.token_ids(TOKEN_ID), vocab_size=VOCAB_SIZE,
            settings=ProbeSettings(model, hardware, software, "float32", NUM_REPEATS), depths=DEPTHS,
            num_probes=NUM_PROBES, max_samples=MAX_SAMPLES, budget_s=budget_s, device=CPU, progress=lambda line: None,
        )
    )  # fmt: skip
    dist.barrier()
    links = profile_links(
        profile_key="bench", hardware=hardware, software=software, device=CPU, budget_s=LINKS_BUDGET_S
    )
    return Profiled(probes, list(links), [])


@dataclass(frozen=True)
class Trained:
    """What one rank observed."""

    rounds: list[list[StepObservation]]
    """`[round][step]`."""
    gradient_error: float | None
    """Largest difference between this rank's gradients of one global batch under two assignments, over the largest
    gradient; None where there is one assignment."""


def train(rank: int, folder: Path, job: Job) -> Trained:
    """One rank of the case's plan, trained by the engine."""
    prepare_process(rank)
    family, source = family_of(job.case.model), Source(job.case.model, job.shapes)
    engine_rank = EngineRank(rank, job.case.plan, family, whole_model(job.case.model), source, job.step_plans)
    same = [i for i, p in enumerate(job.step_plans) if p.sample_index == job.step_plans[0].sample_index]
    gradients = [engine_rank.gradient(i) for i in same]
    errors = [float((g - gradients[0]).abs().max() / gradients[0].abs().max()) for g in gradients[1:]]
    engine_rank.first_steps(NUM_WARM_UP_STEPS)
    return Trained([engine_rank.first_steps(None) for _ in range(job.num_rounds)], max(errors, default=None))


def whole_model(model: str) -> torch.nn.Module:
    """The same weights wherever it is built."""
    family = family_of(model)
    return build_model(family, {**family.hf_config, **family.token_ids(TOKEN_ID)}, seed=0, dtype=torch.float32)
