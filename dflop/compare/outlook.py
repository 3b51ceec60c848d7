"""A plan, and what it would gain, without a run: for hardware that is busy, or that nobody has yet.

The dataset is profiled as for a run, in a run that trains nothing. Costs are those the
store has measured for this model, or data-sheet ones for a named device. Everything that comes out is simulated.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from dflop.config import Config
from dflop.cost.activations import compiled
from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.devices import find_device
from dflop.cost.flops import peak_flops_per_s
from dflop.cost.model import CostModel
from dflop.cost.roofline import COMPILED, EAGER, Program
from dflop.cost.throughput import Workload
from dflop.errors import CostError
from dflop.launch import Launcher
from dflop.models.ways import WAYS
from dflop.plan.space import Problem
from dflop.profile.forecast import PlannedProbe, plan_probes
from dflop.profile.groups import used_modules
from dflop.records import FP8_OFF, ClusterSpec, CostTable, ModuleSpec, ProfileRecord, SampleShape
from dflop.run.batches import profiled_ways, stages_of
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.run.queue import launcher_of
from dflop.steps import planning
from dflop.steps.profiling import stored_profile
from dflop.steps.session import judged_data, own_run
from dflop.store.reader import Reader

T = TypeVar("T")

MAX_SAMPLES = 20_000
"""Shapes that batches are drawn from: more would not change them, and a million take minutes to read."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a plan would be made for: data, cluster and costs of a configuration."""

    task: planning.Task
    shapes: tuple[SampleShape, ...]
    """Samples that batches are drawn from."""
    source: str
    """Where costs come from: `measured on ...`, or a data sheet and how far it is off; and corrections in force."""
    workload: Workload
    """The problem's batches, an epoch of them being the dataset."""
    make: Callable[[int], planning.Task]
    """The task of another global batch size."""
    compiled: CostModel | None = None
    """Costs of a data sheet for compiled programs; None: the costs are measured."""

    @property
    def problem(self) -> Problem:
        return self.task.problem

    def at(self, global_batch_size: int) -> Outlook:
        """The same for another global batch size."""
        task = self.make(global_batch_size)
        return replace(self, task=task, workload=replace(self.workload, batches=task.problem.batches))


async def look_ahead(config: Config, device: str, cluster: ClusterSpec, say: Say) -> Outlook:
    """Profiles the dataset where that is not done; what is left is planning.

    Args:
        config: Run configuration; the dataset is profiled on its cluster.
        device: Key of a data sheet (`h100`, ...) for analytic costs; empty: measured costs.
        cluster: To plan for.
        say: Receives lines on what happens.

    Raises:
        CostError: measured costs are wanted and the store has none.
        ConfigError: an unknown device.
    """
    return await _with_profile(config, "plan", say, lambda run, key: _outlook(run, key, device, cluster, say))


async def look_at_probes(config: Config, device: str, say: Say) -> list[PlannedProbe]:
    """The probes a profile of the modules would take, timed by the data sheet of `device` where one is named."""
    return await _with_profile(config, "probes", say, lambda run, key: _probes(run.config(), key, device))


async def _with_profile(config: Config, suffix: str, say: Say, look: Callable[[RunDir, str], T]) -> T:
    async with own_run(config, suffix, say) as run:
        found = await judged_data(run, _launcher(run, say), say)
        return await asyncio.to_thread(look, run, found.profile_key)


def _launcher(run: RunDir, say: Say) -> Launcher:
    """For jobs that only read the dataset: where the cluster is out of reach, this machine's."""
    config = run.config()
    if config.cluster.backend != "slurm" or shutil.which("sbatch") is not None:
        return launcher_of(run, config)
    from dflop.launch.local import LocalLauncher

    say("no sbatch on this machine: profiling the dataset locally")
    return LocalLauncher()


def _probes(config: Config, profile_key: str, device: str) -> list[PlannedProbe]:
    family, settings = planning.bound_family(config), config.model_profile
    specs, sheet = family.specs(), find_device(device) if device else None
    drawn, largest = _shapes(config, profile_key)
    shapes = list({s.sample_index: s for s in (*drawn, *largest)}.values())
    tables: list[CostTable] = []
    if sheet is not None:
        for frozen in ((), [spec.module for spec in specs]):
            tables += analytic_cost_tables(specs, sheet, profile_key="", frozen=frozen)
    return [
        probe
        for tp in settings.tp
        for probe in plan_probes(
            family,
            shapes,
            depths=settings.num_layers,
            num_probes=settings.num_probes,
            max_samples=config.plan.max_probe_samples,
            num_repeats=settings.num_repeats,
            budget_s=settings.budget_s,
            seed=config.model.seed,
            ways=[WAYS[name] for name in profiled_ways(config)],
            tp=tp,
            tables=tables,
            memory_bytes=sheet.memory_bytes if sheet else None,
        )
    ]


def _outlook(run: RunDir, profile_key: str, device: str, cluster: ClusterSpec, say: Say) -> Outlook:
    config = run.config()
    *earlier, last = stages_of(config)
    if earlier:
        say(f"planning for the last of {len(earlier) + 1} stages, `{last.name}`")
    # Batches of given steps are drawn from all samples, random ones are as good from some.
    is_drawn = bool(earlier) or config.plan.horizon_steps > 0
    shapes, worst = _shapes(config, profile_key, None if is_drawn else MAX_SAMPLES)
    with Reader(config.store) as reader:
        (profile,) = reader.records(ProfileRecord, where={"profile_key": profile_key})
    specs = used_modules(planning.bound_family(config), (*shapes, *worst))
    costs, source, hardware = _costs(run, config, specs, device, cluster, say)

    def make(global_batch_size: int, costs: planning.Costs = costs) -> planning.Task:
        plan = config.plan.model_copy(update={"global_batch_size": global_batch_size})
        sized, first = config.model_copy(update={"plan": plan}), last.first_step or None
        return planning.planning_task(run.run_id, sized, specs, costs, shapes, worst, cluster=cluster, from_step=first)

    task = make(config.plan.global_batch_size)
    problem = task.problem
    workload = Workload(
        specs=problem.specs,
        frozen=task.basis.frozen,
        batches=problem.batches,
        num_gpus=cluster.num_processes,
        peak_flops_per_s=peak_flops_per_s(hardware, "bfloat16" if device else config.model.dtype),
        num_samples=profile.num_rows,
        adapted=tuple(config.train.lora.targets) if config.train.lora is not None else (),
    )
    source = "; ".join(filter(None, (source, task.corrections_text)))
    sheet_costs = _sheet_costs(config, device, cluster, COMPILED) if device else None
    compiled = make(config.plan.global_batch_size, sheet_costs).problem.cost if sheet_costs else None
    return Outlook(task, tuple(shapes), source, workload, make, compiled)


def _shapes(
    config: Config, profile_key: str, max_samples: int | None = MAX_SAMPLES
) -> tuple[list[SampleShape], list[SampleShape]]:
    """(drawn at random, the largest)."""
    with Reader(config.store) as reader:
        return reader.shapes(profile_key, max_samples=max_samples), reader.largest_samples(profile_key)


def _costs(
    run: RunDir, config: Config, specs: Sequence[ModuleSpec], device: str, cluster: ClusterSpec, say: Say
) -> tuple[planning.Costs, str, str]:
    """(costs, their source, hardware)."""
    if device:
        sheet = find_device(device)
        source = sheet.source
        if config.train.fp8 != FP8_OFF:
            source += f"; {config.train.fp8} FP8 in its layers, of which 9 published runs are predicted within 10 %"
        return _sheet_costs(config, device, cluster), source, sheet.name
    key, hardware, _ = planning.model_profile_key(config)
    if stored_profile(config.store, key) is None:
        raise CostError(
            f"the store has no cost tables of this model on {hardware}",
            where=str(config.store),
            hint="measure them: dflop profile CONFIG; or plan from a data sheet: --device h100",
        )
    return planning.cost_tables(run.run_id, config, key, specs, say), f"measured on {hardware}", hardware


def _sheet_costs(config: Config, device: str, cluster: ClusterSpec, program: Program | None = None) -> planning.Costs:
    """Costs by data sheet of one program for all layers; None: as the configuration trains.

    What the configuration compiles keeps as much in either, so that plans by both are held to the same memory.
    """
    sheet, num_nodes = find_device(device), cluster.num_nodes + 1  # an explanation asks what one more would do
    each, family = cluster.num_processes_per_node, planning.bound_family(config)
    links = analytic_link_costs(sheet, num_nodes=num_nodes, num_processes_per_node=each, profile_key="")
    frozen, lora = stages_of(config)[-1].frozen, config.train.lora
    adapted = tuple(lora.targets) if lora is not None else ()
    price = partial(analytic_cost_tables, device=sheet, profile_key="", fp8=config.train.fp8)

    def tables(specs: Sequence[ModuleSpec], frozen: Sequence[str]) -> list[CostTable]:
        if not config.train.compile:
            return price(specs, frozen=frozen, program=program or EAGER)
        specs = [compiled(spec, is_frozen=spec.module in frozen) for spec in specs]
        return price(specs, frozen=frozen, program=COMPILED)

    # What adapters cost follows from the tables of the trained and of the frozen module.
    both = [spec for spec in family.specs() if spec.module in adapted and spec.module not in frozen]
    return planning.Costs(tables(family.specs(), frozen) + tables(both, adapted), links)
