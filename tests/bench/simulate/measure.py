"""What the bench's processes do: profile a model, and train the steps that were predicted."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.models.build import build_model
from dflop.models.family import Family
from dflop.parallel.topology import make_groups, seat_of
from dflop.profile.groups import make_group
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.links import profile_links
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import LLM, LinkMeasurement, Measurement, Plan, SampleShape, StepObservation, StepPlan
from dflop.train.engine import Engine
from dflop.train.feed import Feed, PreparedStep, SampleSource
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.plans import PlanMessage
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages, prepare_stages
from tests.bench.profile.cases import VOCAB_SIZE
from tests.bench.simulate.cases import MODELS, TEXT, Case, MadeUpSource, family_of, token_id

CPU = torch.device("cpu")
DEPTHS, NUM_PROBES, MAX_SAMPLES = (2, 4), 24, 6
LINKS_BUDGET_S = 4.0
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0


def take_core(rank: int) -> None:
    """Pin this process to a core of its own while there are as many cores as processes."""
    cores = sorted(os.sched_getaffinity(0))
    if dist.get_world_size() <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)


class Reference:
    """The same probe again and again: whether the machine is as fast as it was."""

    def __init__(self) -> None:
        family = family_of("omni")
        settings = ProbeSettings("reference", "", "", "float32", num_repeats=3)
        self._probe = ModuleProbe(family, family.token_ids(token_id("omni")), VOCAB_SIZE, LLM, 1, settings, CPU)
        self._group = make_group("random", TEXT.shapes(family, 2, seed=5), LLM)
        self.seconds()  # a young process has its heap to grow

    def seconds(self) -> float:
        row = self._probe.measure(self._group)
        return row.forward_s + row.backward_s


@dataclass(frozen=True)
class Profiled:
    """What one rank measured."""

    probes: list[Measurement]
    links: list[LinkMeasurement]
    reference_s: list[float]


def profile(
    rank: int, folder: Path, shapes: Mapping[str, Sequence[SampleShape]], budget_s: float, num_repeats: int
) -> Profiled:
    """Probes of one model per rank, beside each other as training runs, and of the links between them."""
    take_core(rank)
    model, reference = list(MODELS)[rank], Reference()
    family, hardware, software = family_of(model), hardware_name("cpu"), software_name()
    probes, reference_s = [], [reference.seconds()]
    for probe in profile_model(
        family, shapes[model], token_config=family.token_ids(token_id(model)), vocab_size=VOCAB_SIZE,
        settings=ProbeSettings(model, hardware, software, "float32", num_repeats),
        depths=DEPTHS, num_probes=NUM_PROBES, max_samples=MAX_SAMPLES, budget_s=budget_s, device=CPU,
        progress=lambda line: print(f"  {model}, {line}", file=sys.stderr, flush=True),
    ):  # fmt: skip
        probes.append(probe)
    reference_s.append(reference.seconds())
    dist.barrier()
    links = profile_links(
        profile_key="bench", hardware=hardware, software=software, device=CPU, budget_s=LINKS_BUDGET_S
    )
    return Profiled(probes, list(links), reference_s)


@dataclass(frozen=True)
class Run:
    """Steps of one case, one per global batch."""

    case: Case
    step_plans: tuple[StepPlan, ...]
    batches: tuple[tuple[SampleShape, ...], ...]


@dataclass(frozen=True)
class Trained:
    """What one rank observed."""

    rounds: list[list[list[StepObservation]]]
    """`[round][run][step]`."""
    reference_s: list[float]
    """Before each round."""


def train(rank: int, folder: Path, runs: Sequence[Run], num_rounds: int) -> Trained:
    """All steps of all runs, again in every round, so that a machine that slows down slows all of them."""
    take_core(rank)
    trainers, reference = [_TrainedCase(rank, run) for run in runs], Reference()
    rounds, reference_s = [], []
    for _ in range(num_rounds):
        reference_s.append(reference.seconds())
        rounds.append([trainer.round() for trainer in trainers])
    return Trained(rounds, reference_s)


class _TrainedCase:
    """One rank of one run, ready to train its steps."""

    def __init__(self, rank: int, run: Run) -> None:
        family = family_of(run.case.model)
        config = {**family.hf_config, **family.token_ids(token_id(run.case.model))}
        source = MadeUpSource(run.case.model, [shape for batch in run.batches for shape in batch])
        model = build_model(family, config, seed=0, dtype=torch.float32)
        self._rank = EngineRank(rank, run.case.plan, family, model, source, run.step_plans)

    def round(self) -> list[StepObservation]:
        """Every step once."""
        return self._rank.first_steps(None)


class EngineRank:
    """One rank of the engine, ready to train steps whose inputs are made beforehand.

    Args:
        rank: This process.
        plan: Layout.
        family: Of the model.
        model: The same on every rank.
        source: Of the samples.
        step_plans: What is trained; the first has number 0, whatever it says.
    """

    def __init__(
        self, rank: int, plan: Plan, family: Family, model: torch.nn.Module, source: SampleSource,
        step_plans: Sequence[StepPlan],
    ) -> None:  # fmt: skip
        seat, groups = seat_of(plan, rank), make_groups(plan, rank, timeout_s=120)
        stages, sharded = make_stages(model, family, seat, groups.tensor)
        trains = prepare_stages(stages, plan, seat, family, frozen=())
        feed = Feed(source, family, plan, seat, llm_stage_of(stages))
        hidden_size = next(s.hidden_size for s in family.specs() if s.module == LLM)
        width = hidden_size * (1 + family.decoder.num_deep_features)
        settings = OptimizerSettings(LEARNING_RATE, weight_decay=0.01)
        self._step_plans, self._prepared = step_plans, [feed.prepare(p) for p in step_plans]
        self._stages, self._groups = stages, groups
        self._engine = Engine(plan, seat, stages, groups, CPU, hidden_size=hidden_size, row_width=width, trains=trains)
        self._optimizer = make_optimizer(plan, seat, stages, groups, sharded, settings)
        self._reducer = GradientReducer(plan, seat, stages, groups, sharded, owners=self._optimizer.owners)
        self._parts: dict[str, Any] = {
            "plan": plan, "seat": seat, "stages": stages, "groups": groups, "engine": self._engine, "source": source,
            "sharded": sharded, "optimizer": self._optimizer,
        }  # fmt: skip

    def first_steps(self, num_steps: int | None) -> list[StepObservation]:
        """Train the first steps, or all of them, each of which begins on all ranks together."""
        num_steps = len(self._step_plans) if num_steps is None else min(num_steps, len(self._step_plans))
        seen: list[StepObservation] = []
        Trainer(
            settings=LoopSettings("bench", 0, num_steps, LEARNING_RATE, 1, MAX_GRAD_NORM, num_steps),
            feed=Prepared(self._prepared), plans=InTurn(self._step_plans),
            hooks=Hooks(seen.append, complain_of_samples), **self._parts,
        ).run()  # fmt: skip
        return seen

    def gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of one step, flat; nothing is updated."""
        prepared, step_plan = self._prepared[index], self._step_plans[index]
        healthy = torch.ones(len(step_plan.sample_index), dtype=torch.bool)
        self._engine.run(prepared.microbatches, healthy=healthy, num_loss_tokens=step_plan.num_supervised_tokens)
        self._reducer.reduce()
        gradients = [p.grad for p in self._optimizer.parameters.values() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients]).clone()
        self._optimizer.zero_grad()
        return flat


class Prepared:
    """A feed whose inputs were made before: decoding ahead would compete with the step for its core."""

    def __init__(self, steps: Sequence[PreparedStep]) -> None:
        self._steps = steps

    def prepare(self, step_plan: StepPlan, later: Sequence[StepPlan] = ()) -> PreparedStep:
        return self._steps[step_plan.step]

    def look_ahead(self, later: Sequence[StepPlan]) -> None:
        pass

    def close(self) -> None:
        pass


class InTurn:
    """Plans that are there already."""

    def __init__(self, step_plans: Sequence[StepPlan]) -> None:
        self._messages = [PlanMessage(dataclasses.replace(p, step=i), {}) for i, p in enumerate(step_plans)]

    def get(self, step: int) -> PlanMessage:
        return self._messages[step]


def complain_of_samples(step: int, sample_index: int, path: str, reason: str) -> None:
    raise AssertionError(f"step {step}: sample {sample_index} is made up and yet broken: {reason}")
