"""What the processes of the real steps do: profile a model, train its stages with the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dflop.jobs.submit import CPU_ENV
from dflop.models.build import build_model
from dflop.parallel.topology import make_groups, seat_of
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.links import profile_links
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import LLM, SampleShape, StepObservation, StepPlan
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.stages import llm_stage_of, make_stages
from tests.bench.profile.cases import VOCAB_SIZE
from tests.bench.schedule.real_cases import ENCODER_LAYERS, TOKEN_ID, Case, Source, family_of
from tests.bench.simulate.measure import CPU, DEPTHS, InTurn, Prepared, Profiled, complain_of_samples, take_core

NUM_PROBES, MAX_SAMPLES, NUM_REPEATS, LINKS_BUDGET_S = 24, 16, 5, 2.0
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
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


def train_pipeline(rank: int, folder: Path, job: Job) -> list[list[StepObservation]]:
    """`[round][step]` observations of one rank of an encoder | LLM plan, trained by the engine."""
    prepare_process(rank)
    family, plan = family_of(job.case.model), job.case.plan
    seat, model = seat_of(plan, rank), whole_model(job.case.model)
    groups, source = make_groups(plan, rank, timeout_s=120), Source(job.case.model, job.shapes)
    stages, _ = make_stages(model, family, seat, groups.tensor)
    feed = Feed(source, family, plan, seat, llm_stage_of(stages))
    prepared = Prepared([feed.prepare(p) for p in job.step_plans])
    width = _hidden_size(job.case.model)
    engine = Engine(plan, seat, stages, groups, CPU, hidden_size=width, row_width=width)
    optimizer = torch.optim.AdamW([p for s in stages for p in s.names.values() if p.requires_grad], lr=LEARNING_RATE)

    def first_steps(num_steps: int) -> list[StepObservation]:
        seen: list[StepObservation] = []
        Trainer(
            settings=LoopSettings("bench", 0, num_steps, LEARNING_RATE, 1, MAX_GRAD_NORM, num_steps),
            plan=plan, seat=seat, stages=stages, groups=groups, engine=engine, feed=prepared, source=source,
            plans=InTurn(job.step_plans), optimizer=optimizer, hooks=Hooks(seen.append, complain_of_samples),
        ).run()  # fmt: skip
        return seen

    first_steps(min(NUM_WARM_UP_STEPS, len(job.step_plans)))
    return [first_steps(len(job.step_plans)) for _ in range(job.num_rounds)]


def whole_model(model: str) -> torch.nn.Module:
    """The same weights wherever it is built."""
    family = family_of(model)
    return build_model(family, {**family.hf_config, **family.token_ids(TOKEN_ID)}, seed=0, dtype=torch.float32)


def _hidden_size(model: str) -> int:
    return next(s.hidden_size for s in family_of(model).specs() if s.module == LLM)
