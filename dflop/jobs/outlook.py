"""A plan, and what it would gain, without a run: for hardware that is busy, or that nobody has yet.

The dataset is profiled as for a run. Costs are those the store has measured for this model, or data-sheet ones for a
named device. Everything that comes out is simulated.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflop.config import Config
from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.devices import find_device
from dflop.cost.model import CostModel
from dflop.data.distribution import sample_batches
from dflop.errors import CostError
from dflop.jobs import planning, submit
from dflop.jobs.follow import Say, stored_profile
from dflop.jobs.profiling import data_profile, own_run
from dflop.plan.search import make_plans
from dflop.profile.forecast import PlannedProbe, plan_probes
from dflop.profile.ways import WAYS
from dflop.records import ClusterSpec, Plan, SampleShape
from dflop.schedule.scheduler import schedule_step
from dflop.store.reader import Reader

MAX_SAMPLES = 20_000
"""Shapes that batches are drawn from: more would not change them, and a million take minutes to read."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Plans for a dataset and a cluster, best first, and what they were made from."""

    plans: tuple[Plan, ...]
    shapes: tuple[SampleShape, ...]
    cluster: ClusterSpec
    cost: CostModel
    source: str
    """Of the costs: `measured on ...` or `analytic, ...`."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Simulated step times of unseen global batches under a plan, data-blind and balanced."""

    arrival_s: tuple[float, ...]
    balanced_s: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """Total time of the data-blind order over that of the balanced one."""
        return sum(self.arrival_s) / sum(self.balanced_s)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean ratio over batches (normal approximation)."""
        ratios = [a / b for a, b in zip(self.arrival_s, self.balanced_s, strict=True)]
        if len(ratios) < 2:
            return math.nan, math.nan
        half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
        return statistics.fmean(ratios) - half, statistics.fmean(ratios) + half


async def look_ahead(config: Config, device: str, say: Say) -> Outlook:
    """Profiles the dataset where that is not done, and plans.

    Args:
        config: Run configuration; its cluster says how many processes there are.
        device: Key of a data sheet (`h100`, ...) for analytic costs and device memory; empty: measured costs.
        say: Told what happens.

    Raises:
        CostError: measured costs are wanted and the store has none, or an unknown device.
        InfeasiblePlanError: nothing fits.
    """
    async with own_run(config, "plan", say) as run:
        found = await data_profile(run, submit.launcher_of(run, run.config()), say)
        return await asyncio.to_thread(_plan, run.config(), found.profile_key, device, say)


async def look_at_probes(config: Config, device: str, say: Say) -> list[PlannedProbe]:
    """The probes a profile of the modules would take, timed by the data sheet of `device` where one is named."""
    async with own_run(config, "probes", say) as run:
        found = await data_profile(run, submit.launcher_of(run, run.config()), say)
        return await asyncio.to_thread(_probes, run.config(), found.profile_key, device)


def _probes(config: Config, profile_key: str, device: str) -> list[PlannedProbe]:
    family, settings = planning.bound_family(config), config.model_profile
    ways = [WAYS[name] for name in settings.ways]
    frozen = [spec.module for spec in family.specs()]
    with Reader(config.store) as reader:
        shapes = reader.shapes(profile_key, max_samples=MAX_SAMPLES)
    tables = []
    if device:
        sheet = find_device(device)
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
            max_samples=planning.max_probe_samples(config),
            num_repeats=settings.num_repeats,
            budget_s=settings.budget_s,
            seed=config.model.seed,
            ways=ways,
            tp=tp,
            tables=tables,
        )
    ]


def gain(outlook: Outlook, num_batches: int, seed: int) -> Gain:
    """Schedules batches that the plan was not chosen on, under both policies."""
    plan, cluster = outlook.plans[0], outlook.cluster
    limit = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
    steps = [
        schedule_step(
            run_id=plan.run_id, step=step, plan=plan, batch=batch, cost=outlook.cost, max_concurrency=limit
        )
        for step, batch in enumerate(sample_batches(outlook.shapes, plan.global_batch_size, num_batches, seed))
    ]  # fmt: skip
    return Gain(tuple(s.arrival_step_s for s in steps), tuple(s.predicted_step_s for s in steps))


def _plan(config: Config, profile_key: str, device: str, say: Say) -> Outlook:
    with Reader(config.store) as reader:
        shapes = reader.shapes(profile_key, max_samples=MAX_SAMPLES)
    cost, source = _costs(config, device)
    cluster = config.cluster.spec()
    if device:
        cluster = replace(cluster, device="cuda", memory_per_process_bytes=find_device(device).memory_bytes)
    plans = make_plans(
        run_id="outlook",
        specs=planning.used_modules(planning.bound_family(config), shapes),
        cluster=cluster,
        cost=cost,
        batches=sample_batches(shapes, config.plan.global_batch_size, config.plan.num_scenarios, config.train.seed),
        global_batch_size=config.plan.global_batch_size,
        snapshot_seq=0,
        space=planning.search_space(config),
        top=config.plan.top,
        progress=say,
    )
    return Outlook(plans, tuple(shapes), cluster, cost, source)


def _costs(config: Config, device: str) -> tuple[CostModel, str]:
    specs = planning.bound_family(config).specs()
    if device:
        sheet, cluster = find_device(device), config.cluster
        links = analytic_link_costs(
            sheet, num_nodes=cluster.num_nodes, num_processes_per_node=cluster.num_processes_per_node, profile_key=""
        )
        tables = analytic_cost_tables(specs, sheet, profile_key="")
        return CostModel(tables, specs=specs, links=links), f"analytic, {sheet.name}: never measured"
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
    return CostModel(tables, specs=specs, links=link_costs), f"measured on {hardware}"


def gain_rows(found: Gain) -> Sequence[tuple[str, float, float]]:
    """(policy, mean, worst) seconds of a simulated step."""
    pairs = (("data-blind", found.arrival_s), ("balanced", found.balanced_s))
    return [(name, statistics.fmean(values), max(values)) for name, values in pairs]
