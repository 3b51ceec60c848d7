"""What the bench's processes do: profile a model, and train the steps that were predicted."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dflop.models.build import build_model
from dflop.parallel.topology import make_groups, seat_of
from dflop.profile.groups import make_group
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.links import profile_links
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import LLM, LinkMeasurement, Measurement, SampleShape, StepObservation, StepPlan
from dflop.train.engine import Engine
from dflop.train.feed import Feed, PreparedStep
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.plans import PlanMessage
from dflop.train.stages import llm_stage_of, make_stages
from tests.bench.profile.cases import VOCAB_SIZE
from tests.bench.simulate.cases import MODELS, TEXT, Case, MadeUpSource, family_of, token_id

CPU = torch.device("cpu")
DEPTHS, NUM_PROBES, MAX_SAMPLES = (2, 4), 24, 6
LINKS_BUDGET_S = 4.0


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
        family, plan = family_of(run.case.model), run.case.plan
        seat, config = seat_of(plan, rank), {**family.hf_config, **family.token_ids(token_id(run.case.model))}
        model = build_model(family, config, seed=0, dtype=torch.float32)
        groups = make_groups(plan, rank, timeout_s=120)
        stages, _ = make_stages(model, family, seat, groups.tensor)
        source = MadeUpSource(run.case.model, [shape for batch in run.batches for shape in batch])
        feed = Feed(source, family, plan, seat, llm_stage_of(stages))
        hidden_size = next(s.hidden_size for s in family.specs() if s.module == LLM)
        num_steps = len(run.step_plans)
        self._seen: list[StepObservation] = []
        self._trainer = Trainer(
            settings=LoopSettings("bench", 0, num_steps, 1e-5, 1, 1.0, num_steps),
            plan=plan, seat=seat, stages=stages, groups=groups,
            engine=Engine(plan, seat, stages, groups, CPU, hidden_size=hidden_size, row_width=hidden_size),
            feed=Prepared([feed.prepare(p) for p in run.step_plans]), source=source, plans=InTurn(run.step_plans),
            optimizer=torch.optim.AdamW([p for s in stages for p in s.names.values() if p.requires_grad], lr=1e-5),
            hooks=Hooks(self._seen.append, complain_of_samples),
        )  # fmt: skip

    def round(self) -> list[StepObservation]:
        """Every step once."""
        self._seen.clear()
        self._trainer.run()
        return list(self._seen)


class Prepared:
    """A feed whose inputs were made before: decoding ahead would compete with the step for its core."""

    def __init__(self, steps: Sequence[PreparedStep]) -> None:
        self._steps = steps

    def prepare(self, step_plan: StepPlan) -> PreparedStep:
        return self._steps[step_plan.step]


class InTurn:
    """Plans that are there already."""

    def __init__(self, step_plans: Sequence[StepPlan]) -> None:
        self._messages = [PlanMessage(dataclasses.replace(p, step=i), {}) for i, p in enumerate(step_plans)]

    def get(self, step: int) -> PlanMessage:
        return self._messages[step]


def complain_of_samples(step: int, sample_index: int, path: str, reason: str) -> None:
    raise AssertionError(f"step {step}: sample {sample_index} is made up and yet broken: {reason}")
