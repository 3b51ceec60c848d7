"""What measured steps share: small models and their costs, made-up samples, a rank of the engine that trains them.

Inputs are made before a step is timed: decoding ahead would compete with the step for its core.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ruamel.yaml import YAML

from dflop.cost.fit import fit_cost_tables
from dflop.cost.link_costs import fit_link_costs
from dflop.cost.model import CostModel
from dflop.data.shapes import header_of
from dflop.data.tokens import EncodedSample
from dflop.models import load_family
from dflop.models.build import IGNORE_LABEL
from dflop.models.family import Family
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.link_probe import profile_links
from dflop.profile.probe import ProbeSettings
from dflop.profile.profiler import profile_model
from dflop.records import LinkMeasurement, Measurement, MediaItem, Plan, SampleShape, StepObservation, StepPlan
from dflop.train.inputs import PreparedStep
from dflop.train.loop import Hooks
from dflop.train.plan_source import PlanMessage
from dflop.train.step_trace import StepTrace
from tests.bench.command import in_ranks
from tests.bench.figures import ROOT
from tests.models.whole_model import build_model
from tests.train.rank import Rank, loop_settings
from tests.train.synthetic import SyntheticSource

CPU = torch.device("cpu")
DEPTHS, NUM_PROBES, NUM_REPEATS = (2, 4), 24, 5
LINKS_BUDGET_S = 4.0
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
VOCAB_SIZE, FIRST_TEXT_ID, TILE_PX = 2048, 16, 56


def _tiny_omni() -> Family:
    """The demo's model."""
    model = YAML(typ="safe").load(ROOT / "configs/models/tiny_omni.yaml")
    config = dict(model["hf_config"])
    config["text_config"] = {**config["text_config"], "vocab_size": VOCAB_SIZE}
    return load_family(model["family"], config, model["media"])


def _small_tiles(encoder_layers: int) -> Family:
    """A SigLIP tower over small tiles and a Qwen2 decoder."""
    config = {
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[TILE_PX * h, TILE_PX * w] for h in range(1, 4) for w in range(1, 4)],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 112, "intermediate_size": 336,
            "num_hidden_layers": encoder_layers, "num_attention_heads": 4, "image_size": TILE_PX, "patch_size": 14,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 160, "intermediate_size": 448,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        },
    }  # fmt: skip
    return load_family("llava_onevision", config, {"video_frames": 16})


MODELS: Mapping[str, Callable[[], Family]] = {
    "omni": _tiny_omni,
    "equal": partial(_small_tiles, 7),
    "third": partial(_small_tiles, 3),
}
"""In a process each, the encoder of `equal` takes about as long as the LLM, that of `third` a third of both."""


@cache
def family_of(model: str) -> Family:
    return MODELS[model]()


@cache
def token_id(model: str) -> dict[str, int]:
    """Ids of the special tokens, by name."""
    tokens = family_of(model).media_tokens.values()
    names = dict.fromkeys(name for t in tokens for name in (t.begin, t.pad, t.end) if name)
    return {name: number for number, name in enumerate(names, start=1)}


def build(model: str) -> torch.nn.Module:
    """The same weights wherever it is built."""
    family = family_of(model)
    config = {**family.hf_config, **family.token_ids(token_id(model))}
    return build_model(family, config, seed=0, dtype=torch.float32)


class MadeUpSource(SyntheticSource):
    """The same for any of the models, whose media have layouts of their own."""

    def __init__(self, model: str, shapes: Sequence[SampleShape]) -> None:
        super().__init__(shapes)
        self._family, self._ids = family_of(model), token_id(model)

    def tokens(self, sample_index: int) -> EncodedSample:
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
        return EncodedSample(np.asarray(ids), labels, tuple(positions))

    def _layout(self, shape: SampleShape, item: MediaItem) -> tuple[str | int, ...]:
        return self._family.place(header_of(item), len(shape.items)).layout

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


def costs_of(shapes: Mapping[str, Sequence[SampleShape]], budget_s: float, max_samples: int) -> dict[str, CostModel]:
    """By model; `shapes` are what each is profiled with, in groups of `max_samples` at most."""
    found = in_ranks(profile, len(shapes), shapes, budget_s, max_samples)
    links, costs = fit_link_costs(found[0][1]), {}
    for model, (probes, _) in zip(shapes, found, strict=True):
        probed = {probe.module for probe in probes}
        specs = tuple(s for s in family_of(model).specs() if s.module in probed)
        costs[model] = CostModel(fit_cost_tables(probes, specs), specs=specs, links=links, extrapolate=True)
    return costs


def profile(
    rank: int, folder: Path, shapes: Mapping[str, Sequence[SampleShape]], budget_s: float, max_samples: int
) -> tuple[list[Measurement], list[LinkMeasurement]]:
    """Probes of one model per rank, at the same time as training would run, and of the links between the ranks."""
    take_core(rank)
    model = list(shapes)[rank]
    family, hardware, software = family_of(model), hardware_name("cpu"), software_name()
    probes = list(
        profile_model(
            family, shapes[model], token_config=family.token_ids(token_id(model)),
            settings=ProbeSettings(model, hardware, software, "float32", NUM_REPEATS),
            depths=DEPTHS, num_probes=NUM_PROBES, max_samples=max_samples, budget_s=budget_s, device=CPU,
            progress=lambda line: print(f"  {model}, {line}", file=sys.stderr, flush=True),
        )
    )  # fmt: skip
    dist.barrier()
    links = profile_links(
        profile_key="bench", hardware=hardware, software=software, device=CPU, budget_s=LINKS_BUDGET_S
    )
    return probes, list(links)


class EngineRank(Rank):
    """One rank of the engine, ready to train steps whose inputs are made beforehand.

    Args:
        rank: This process.
        model: Its name.
        plan: Layout.
        step_plans: What is trained; the first has number 0, whatever it says.
        batches: Global batches that hold all of their samples.
    """

    def __init__(
        self, rank: int, model: str, plan: Plan, step_plans: Sequence[StepPlan],
        batches: Sequence[Sequence[SampleShape]],
    ) -> None:  # fmt: skip
        super().__init__(rank, plan, family_of(model), build(model), rate=LEARNING_RATE, weight_decay=0.01)
        self._source = MadeUpSource(model, [shape for batch in batches for shape in batch])
        feed = super().feed(self._source)
        self._batches, self._step_plans, self._prepared = batches, step_plans, [feed.prepare(p) for p in step_plans]

    def feed(self, source: Any, **options: Any) -> Any:
        return Prepared(self._prepared)

    def first_steps(self, num_steps: int | None) -> list[StepObservation]:
        """Train the first steps, or all of them, each of which begins on all ranks together."""
        num_steps = len(self._step_plans) if num_steps is None else min(num_steps, len(self._step_plans))
        seen: list[StepObservation] = []
        settings = loop_settings(
            "bench", num_steps, LEARNING_RATE, warmup_steps=1, max_grad_norm=MAX_GRAD_NORM, checkpoint_every=num_steps
        )
        hooks = Hooks(seen.append, complain_of_samples)
        self.trainer(settings, self._source, InTurn(self._step_plans), hooks).run()
        return seen

    def gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of one step, flat; nothing is updated."""
        self.reduce(self.passes(index))
        gradients = [p.grad for p in self.optimizer.parameters.values() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients]).clone()
        self.reducer.zero()
        return flat

    def train(self, index: int) -> float:
        """Trains one step without the loop around it; this process's share of the loss."""
        trace = self.passes(index)
        self.update(trace, LEARNING_RATE, MAX_GRAD_NORM)
        return trace.loss

    def passes(self, index: int) -> StepTrace:
        """Forward and backward of one step."""
        return self.run(self._prepared[index].microbatches, self._batches[index])


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
