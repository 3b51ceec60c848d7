"""The configurations of the DFLOP paper, as problems for the planner: models, machines, batches, costs of data sheets.

A case is a model on 8 nodes of 8 A100 with a global batch of 512 samples, which leaves 8 samples to a GPU; the paper's
own batch size is not known to us. Costs are analytic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflop import resources
from dflop.compare.contest import Setting
from dflop.config import load_model
from dflop.cost.activations import compiled
from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.devices import A100, Device
from dflop.cost.model import CostModel
from dflop.cost.roofline import COMPILED, EAGER, Program
from dflop.cost.throughput import Workload
from dflop.data.distribution import sample_batches
from dflop.data.size_table import profile_sizes, read_sizes
from dflop.models import load_family
from dflop.models.family import Family
from dflop.plan.space import Problem, SearchSpace
from dflop.records import FP8_OFF, LLM, ClusterSpec, ModuleSpec, SampleShape
from tests.bench.data import shape_rules
from tests.bench.expert_models import RELEASED, ExpertModel
from tests.bench.mixtures import Mixture, draw_batches

NUM_NODES, NUM_GPUS_PER_NODE, GLOBAL_BATCH_SIZE = 8, 8, 512
NUM_SCENARIOS = 4
"""Batches that plans are made on."""
NUM_UNSEEN = 8
"""Other batches, that plans are compared on."""
PLANNING_SEED, UNSEEN_SEED, NUM_SEEDS = 0, 1, 2
"""Of a setting's first draw; every other draw takes the next `NUM_SEEDS`."""
TPS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the paper's comparison."""

    name: str
    model: str
    """File in `configs/models/`, without its ending, or a name of `expert_models.py`."""
    published: tuple[float, float] | None
    """Least and largest speedup over Megatron and PyTorch baselines that two public summaries of the paper state.
    Secondary: the paper itself was not read, the summaries contradict each other, and only 1.2 to 3.6 over all models
    is common to both. None where only one of them says something."""
    max_llm_tokens: int = 32_768
    """Of a sample: longer ones lose frames or tiles, then text."""


CASES = (
    Case("SigLIP + Qwen2.5-7B", "llava_onevision_qwen2_5_7b", (1.2, 1.3)),
    Case("SigLIP + Llama-3-8B", "llava_onevision_llama3_8b", None),
    Case("SigLIP + Qwen2.5-32B", "llava_onevision_qwen2_5_32b", (2.3, 2.7)),
    Case("SigLIP + Qwen2.5-72B", "llava_onevision_qwen2_5_72b", (3.1, 3.6)),
    # As InternVL-2.5 was trained. With 32k tokens, 128 tiles are one item or sample that keeps 0.8 GB per layer of
    # InternViT-6B, and no uniform plan has room for that.
    Case("InternViT-6B + Qwen2.5-72B", "internvl2_5_78b", (3.1, 3.6), max_llm_tokens=16_384),
)


def make_setting(
    case: Case,
    mixture: Mixture,
    *,
    num_nodes: int = NUM_NODES,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
    num_unseen: int = NUM_UNSEEN,
    device: Device = A100,
    encoder_factor: float = 1.0,
    space: SearchSpace | None = None,
    draw: int = 0,
    shapes: Sequence[SampleShape] = (),
    fp8: str = FP8_OFF,
    is_compiled: bool = False,
) -> Setting:
    """A problem and unseen batches.

    Args:
        case: Model.
        mixture: Data, or what is like `shapes`.
        num_nodes: Machines of 8 GPUs.
        global_batch_size: Samples per step.
        num_unseen: Batches to judge on.
        device: Whose data sheet is used.
        encoder_factor: Multiplies the seconds of every encoder.
        space: What plans may choose; None: everything.
        draw: Which draw of batches, those that are planned on and the unseen ones alike.
        shapes: A dataset that batches are drawn from in place of the mixture.
        fp8: Recipe of the LLM's Linears, of every competitor; without compiling FP8 loses, so ours compiles, too.
        is_compiled: Whether ours does, `train.compile`.
    """
    family = suite_family(case, mixture)
    limits: dict[str, Any] = {"global_batch_size": global_batch_size}
    if shapes:
        batches = partial(sample_batches, shapes, **limits)
    else:
        batches = partial(draw_batches, family, mixture, max_llm_tokens=case.max_llm_tokens, **limits)
    planned = tuple(batches(num_batches=NUM_SCENARIOS, seed=PLANNING_SEED + NUM_SEEDS * draw))
    specs = suite_specs(family)
    problem = Problem(
        run_id="suite",
        specs=specs,
        cluster=cluster_of(device, num_nodes),
        cost=analytic_costs(specs, device, num_nodes, encoder_factor, fp8=fp8, is_compiled=is_compiled),
        batches=planned,
        global_batch_size=global_batch_size,
        snapshot_seq=0,
        space=space or SearchSpace(whole_samples=family.whole_samples),
    )
    unseen = tuple(batches(num_batches=num_unseen, seed=UNSEEN_SEED + NUM_SEEDS * draw))
    workload = Workload(specs, (), unseen, problem.cluster.num_processes, device.peak_bf16_flops, global_batch_size)
    data = "real sizes" if shapes else mixture.name
    compiled = analytic_costs(specs, device, num_nodes, encoder_factor, COMPILED, fp8)
    return Setting(case.name, data, problem, unseen, device.source, workload, compiled)


def real_shapes(case: Case, mixture: Mixture, sizes: Path) -> list[SampleShape]:
    """The samples of a table of sizes as the product reads them, those with audio and those too long left out."""
    rules = shape_rules(suite_family(case, mixture), case.max_llm_tokens)
    return [shape for shape in profile_sizes(read_sizes(sizes), rules) if isinstance(shape, SampleShape)]


def suite_family(case: Case, mixture: Mixture) -> Family:
    """The case's family, with a limit of frames that cuts no video of the mixture."""
    if case.model in RELEASED:
        return ExpertModel(case.model)
    model = load_model(resources.path("configs") / "models" / f"{case.model}.yaml")
    return load_family(model.family, model.hf_config, {**model.media, "video_frames": mixture.max_frames})


def suite_specs(family: Family) -> tuple[ModuleSpec, ...]:
    """Modules with every degree that trainers of this size use, not only those that this package trains with.

    InternViT's 25 heads divide by no tp; trainers pad them. The padding is not charged, in favour of uniform layouts,
    which need it most. Models with experts have this package's degrees, which the comparison widens for others.
    """
    if isinstance(family, ExpertModel):
        return family.specs()
    return tuple(
        spec if spec.module == LLM else dataclasses.replace(spec, tp_choices=tuple(sorted({*spec.tp_choices, *TPS})))
        for spec in family.specs()
    )


def analytic_costs(
    specs: Sequence[ModuleSpec], device: Device, num_nodes: int, encoder_factor: float, program: Program = EAGER,
    fp8: str = FP8_OFF, *, is_compiled: bool = False,
) -> CostModel:  # fmt: skip
    """Costs of a data sheet, encoders' seconds multiplied; what we compile, as with FP8, keeps as much."""
    links = analytic_link_costs(
        device, num_nodes=num_nodes, num_processes_per_node=NUM_GPUS_PER_NODE, profile_key="suite"
    )
    price = partial(analytic_cost_tables, device=device, profile_key="suite", fp8=fp8)
    if is_compiled or fp8 != FP8_OFF:
        tables = price([compiled(spec) for spec in specs], program=COMPILED)
    else:
        tables = price(specs, program=program)
    corrections = {s.module: encoder_factor for s in specs if s.module != LLM} if encoder_factor != 1.0 else {}
    return CostModel(tables, corrections, specs=specs, links=links, extrapolate=True)


def cluster_of(device: Device, num_nodes: int) -> ClusterSpec:
    """So many nodes of 8 devices."""
    return ClusterSpec(
        name=f"{num_nodes} nodes of {NUM_GPUS_PER_NODE} {device.name}",
        backend="slurm",
        num_nodes=num_nodes,
        num_processes_per_node=NUM_GPUS_PER_NODE,
        memory_per_process_bytes=device.memory_bytes,
        device="cuda",
        num_cores_per_node=128,
    )
