"""A plan, and what it would gain, without a run: for hardware that is busy, or that nobody has yet.

The dataset is profiled as for a run. Costs are those the store has measured for this model, or data-sheet ones for a
named device. Everything that comes out is simulated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dflop.config import Config
from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.devices import find_device
from dflop.cost.model import CostModel
from dflop.cost.towers import tables_for
from dflop.data.distribution import sample_batches
from dflop.errors import CostError
from dflop.models.ways import WAYS
from dflop.plan.space import Problem
from dflop.profile.forecast import PlannedProbe, plan_probes
from dflop.records import ClusterSpec, CostTable, SampleShape
from dflop.run.batches import profiled_ways, stages_of
from dflop.run.launcher import reading_launcher_of
from dflop.run.messages import Say
from dflop.steps import planning
from dflop.steps.profiling import data_profile, own_run, stored_profile
from dflop.store.reader import Reader

MAX_SAMPLES = 20_000
"""Shapes that batches are drawn from: more would not change them, and a million take minutes to read."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a plan would be made for: data, cluster and costs of a configuration."""

    problem: Problem
    shapes: tuple[SampleShape, ...]
    """Those that batches are drawn from."""
    source: str
    """Of the costs: `measured on ...` or `analytic, ...`."""


async def look_ahead(config: Config, device: str, cluster: ClusterSpec, say: Say) -> Outlook:
    """Profiles the dataset where that is not done; what is left is planning.

    Args:
        config: Run configuration; the dataset is profiled on its cluster.
        device: Key of a data sheet (`h100`, ...) for analytic costs; empty: measured costs.
        cluster: To plan for.
        say: Told what happens.

    Raises:
        CostError: measured costs are wanted and the store has none, or an unknown device.
    """
    async with own_run(config, "plan", say) as run:
        found = await data_profile(run, reading_launcher_of(run, run.config(), say), say)
        return await asyncio.to_thread(_outlook, run.config(), found.profile_key, device, cluster)


async def look_at_probes(config: Config, device: str, say: Say) -> list[PlannedProbe]:
    """The probes a profile of the modules would take, timed by the data sheet of `device` where one is named."""
    async with own_run(config, "probes", say) as run:
        found = await data_profile(run, reading_launcher_of(run, run.config(), say), say)
        return await asyncio.to_thread(_probes, run.config(), found.profile_key, device)


def _probes(config: Config, profile_key: str, device: str) -> list[PlannedProbe]:
    family, settings = planning.bound_family(config), config.model_profile
    ways = [WAYS[name] for name in profiled_ways(config)]
    frozen = [spec.module for spec in family.specs()]
    with Reader(config.store) as reader:
        drawn, largest = reader.shapes(profile_key, max_samples=MAX_SAMPLES), reader.largest_samples(profile_key)
    shapes = list({s.sample_index: s for s in (*drawn, *largest)}.values())
    tables: list[CostTable] = []
    memory_bytes: int | None = None
    if device:
        sheet = find_device(device)
        memory_bytes = sheet.memory_bytes
        tables = analytic_cost_tables(family.specs(), sheet, profile_key="")
        tables += analytic_cost_tables(family.specs(), sheet, profile_key="", frozen=frozen)
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
            ways=ways,
            tp=tp,
            tables=tables,
            memory_bytes=memory_bytes,
        )
    ]


def _outlook(config: Config, profile_key: str, device: str, cluster: ClusterSpec) -> Outlook:
    with Reader(config.store) as reader:
        shapes = reader.shapes(profile_key, max_samples=MAX_SAMPLES)
        worst = reader.largest_samples(profile_key)
    cost, source = _costs(config, device, cluster)
    problem = Problem(
        run_id="outlook",
        specs=planning.used_modules(planning.bound_family(config), (*shapes, *worst)),
        cluster=cluster,
        cost=cost.extrapolating(),
        batches=tuple(
            sample_batches(shapes, config.plan.global_batch_size, config.plan.num_scenarios, config.train.seed)
        ),
        global_batch_size=config.plan.global_batch_size,
        snapshot_seq=0,
        space=planning.search_space(config),
        worst_samples=tuple(worst),
    )
    return Outlook(problem, tuple(shapes), source)


def _costs(config: Config, device: str, cluster: ClusterSpec) -> tuple[CostModel, str]:
    specs, frozen = planning.bound_family(config).specs(), stages_of(config)[-1].frozen
    if device:
        sheet = find_device(device)
        links = analytic_link_costs(  # an explanation asks what one node more would do
            sheet,
            num_nodes=cluster.num_nodes + 1,
            num_processes_per_node=cluster.num_processes_per_node,
            profile_key="",
        )
        tables, held = tables_for(analytic_cost_tables(specs, sheet, profile_key="", frozen=frozen), frozen)
        cost = CostModel(tables, specs=specs, links=links, frozen=held)
        return cost, f"analytic, {sheet.name}: never measured"
    key, hardware, _ = planning.model_profile_key(config)
    tables = []
    if stored_profile(config.store, key) is not None:
        with Reader(config.store) as reader:
            tables, link_costs = reader.latest_cost_tables(key), reader.latest_link_costs(key)
    if not tables:
        raise CostError(
            f"the store has no cost tables of this model on {hardware}",
            where=str(config.store),
            hint="measure them: dflop profile CONFIG; or plan from a data sheet: --device h100",
        )
    tables, held = tables_for(tables, frozen)
    return CostModel(tables, specs=specs, links=link_costs, frozen=held), f"measured on {hardware}"
