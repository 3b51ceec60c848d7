"""What the processes of measured steps share: made-up samples, and one rank of the engine that trains them.

Inputs are made before a step is timed: decoding ahead would compete with the step for its core.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.models.build import IGNORE_LABEL, build_model
from dflop.models.family import Family
from dflop.parallel.topology import make_groups, seat_of
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.links import profile_links
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import LLM, LinkMeasurement, Measurement, MediaItem, Plan, SampleShape, StepObservation, StepPlan
from dflop.train.engine import Engine
from dflop.train.feed import Feed, PreparedStep, SampleSource, TokenizedSample
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.plans import PlanMessage
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages, prepare_stages
from tests.bench.profile import VOCAB_SIZE, tiny_llava, tiny_omni

CPU = torch.device("cpu")
DEPTHS, NUM_PROBES, MAX_SAMPLES, NUM_REPEATS = (2, 4), 24, 6, 5
LINKS_BUDGET_S = 4.0
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
MODELS: Mapping[str, Callable[[], tuple[Family, dict[str, int], tuple[str, ...]]]] = {
    "omni": tiny_omni,
    "llava": tiny_llava,
}
FIRST_TEXT_ID = 16


@cache
def family_of(model: str) -> Family:
    return MODELS[model]()[0]


@cache
def token_id(model: str) -> dict[str, int]:
    """Ids of the special tokens, by name."""
    tokens = family_of(model).media_tokens.values()
    names = dict.fromkeys(name for t in tokens for name in (t.begin, t.pad, t.end) if name)
    return {name: number for number, name in enumerate(names, start=1)}


class MadeUpSource:
    """Tokens and encoder inputs that are a pure function of (sample, item)."""

    def __init__(self, model: str, shapes: Sequence[SampleShape]) -> None:
        self._family, self._ids = family_of(model), token_id(model)
        self._shapes = {s.sample_index: s for s in shapes}

    def shape(self, sample_index: int) -> SampleShape:
        return self._shapes[sample_index]

    def tokens(self, sample_index: int) -> TokenizedSample:
        shape, rng = self._shapes[sample_index], np.random.default_rng(sample_index)
        ids: list[int] = []
        positions = []
        for item in shape.items:
            pad = self._ids[self._family.media_tokens[item.kind].pad]
            for part in self._layout(shape, item):
                if isinstance(part, str):
                    ids.append(self._ids[part])
                else:
                    positions.append(len(ids) + np.arange(part))
                    ids += [pad] * part
        ids += rng.integers(FIRST_TEXT_ID, VOCAB_SIZE, shape.num_llm_tokens - len(ids)).tolist()
        labels = np.full(len(ids), IGNORE_LABEL)
        labels[-shape.num_supervised_tokens :] = ids[-shape.num_supervised_tokens :]
        return TokenizedSample(np.asarray(ids), labels, tuple(positions))

    def _layout(self, shape: SampleShape, item: MediaItem) -> tuple[str | int, ...]:
        return self._family.place(
            item.kind, width_px=item.width_px, height_px=item.height_px, num_frames=item.num_frames,
            duration_s=item.duration_s, num_images=len(shape.items),
        ).layout  # fmt: skip

    def array(self, sample_index: int, item: int) -> np.ndarray:
        media = self._shapes[sample_index].items[item]
        rng = np.random.default_rng([sample_index, item])
        return rng.standard_normal(self._family.array_shape(media.module, media.grid), dtype=np.float32)


def take_core(rank: int) -> None:
    """Pin this process to one core while there are as many cores as processes."""
    cores = sorted(os.sched_getaffinity(0))
    if dist.get_world_size() <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Profiled:
    """What one rank measured."""

    probes: list[Measurement]
    links: list[LinkMeasurement]


def profile(rank: int, folder: Path, shapes: Mapping[str, Sequence[SampleShape]], budget_s: float) -> Profiled:
    """Probes of one model per rank, at the same time as training would run, and of the links between the ranks."""
    take_core(rank)
    model = list(MODELS)[rank]
    family, hardware, software = family_of(model), hardware_name("cpu"), software_name()
    probes = list(
        profile_model(
            family, shapes[model], token_config=family.token_ids(token_id(model)), vocab_size=VOCAB_SIZE,
            settings=ProbeSettings(model, hardware, software, "float32", NUM_REPEATS),
            depths=DEPTHS, num_probes=NUM_PROBES, max_samples=MAX_SAMPLES, budget_s=budget_s, device=CPU,
            progress=lambda line: print(f"  {model}, {line}", file=sys.stderr, flush=True),
        )
    )  # fmt: skip
    dist.barrier()
    links = profile_links(
        profile_key="bench", hardware=hardware, software=software, device=CPU, budget_s=LINKS_BUDGET_S
    )
    return Profiled(probes, list(links))


@dataclass(frozen=True)
class Run:
    """Steps of one plan, one per global batch."""

    model: str
    plan: Plan
    step_plans: tuple[StepPlan, ...]
    batches: tuple[tuple[SampleShape, ...], ...]


def train(rank: int, folder: Path, run: Run, num_rounds: int) -> list[list[StepObservation]]:
    """What one rank observed: all steps, again in every round, so that a slow minute hits all of them."""
    take_core(rank)
    family = family_of(run.model)
    source = MadeUpSource(run.model, [shape for batch in run.batches for shape in batch])
    model = build_model(
        family, {**family.hf_config, **family.token_ids(token_id(run.model))}, seed=0, dtype=torch.float32
    )
    engine_rank = EngineRank(rank, run.plan, family, model, source, run.step_plans)
    return [engine_rank.first_steps(None) for _ in range(num_rounds)]


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
    """A feed whose inputs were made before."""

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
