"""From the store to a plan: fit cost tables where they are missing, sample the data, search, write the plan down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflop.config import Config
from dflop.cost.fit import fit_cost_tables
from dflop.cost.links import fit_link_costs
from dflop.cost.model import CostModel
from dflop.data.distribution import sample_batches
from dflop.errors import StoreError
from dflop.jobs.inputs import run_input
from dflop.jobs.rundir import RunDir, family_of, tokenizer_of
from dflop.models.family import Family
from dflop.plan.search import make_plans
from dflop.plan.space import SearchSpace
from dflop.profile.hardware import hardware_name, software_name
from dflop.records import CostTable, LinkCost, LinkMeasurement, Measurement, ModuleSpec, Plan, SampleShape
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.snapshot import Current
from dflop.store.spool import SpoolWriter

Say = Callable[[str], None]

FEWEST_LIKELY = 4
"""Microbatches of a plan when the configuration leaves their number open: fewer leave most of a pipeline idle."""


def bound_family(config: Config) -> Family:
    """The run's family with the vocabulary of the dataset's tokenizer."""
    return family_of(config, tokenizer_of(config).vocab_size)


def model_profile_key(config: Config) -> tuple[str, str, dict[str, object]]:
    """(key, hardware, inputs) of the model profile: same model, hardware, software and settings, same key."""
    hardware = config.cluster.hardware
    if hardware == "auto":
        hardware = hardware_name(config.cluster.device)
    inputs: dict[str, object] = {
        "family": config.model.family,
        "rules_key": bound_family(config).rules_key,
        "dtype": config.model.dtype,
        "attention": config.model.attention,
        "hardware": hardware,
        "software": software_name(),
        "settings": config.model_profile.model_dump(mode="json"),
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return key, hardware, inputs


def max_probe_samples(config: Config) -> int:
    """Samples of the largest probe: those of the largest microbatch that a plan can have, or is likely to have."""
    return max(1, config.plan.global_batch_size // min(config.plan.microbatch_choices, default=FEWEST_LIKELY))


def search_space(config: Config) -> SearchSpace:
    """What the configuration lets the planner choose."""
    wanted = config.plan
    return SearchSpace(
        layouts=wanted.layouts,
        tps=(1,) if config.train.shard_parameters else None,
        recompute=wanted.recompute,
        shard_optimizer=wanted.shard_optimizer,
        microbatches=wanted.microbatch_choices,
    )


def used_modules(family: Family, shapes: Sequence[SampleShape]) -> tuple[ModuleSpec, ...]:
    """Modules the data brings work to; an encoder nobody uses gets no process."""
    return tuple(s for s in family.specs() if any(x.load(s.module).num_tokens for x in shapes))


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan is made from."""

    tables: list[CostTable]
    links: list[LinkCost]
    snapshot: Current
    """Where they were read."""


def cost_tables(run: RunDir, config: Config, profile_key: str, say: Say) -> Costs:
    """Cost tables and link costs of a finished model profile, fitted and stored first where there are none."""
    family = bound_family(config)
    with Reader(config.store) as reader:
        tables = reader.latest_cost_tables(profile_key)
        if tables:
            return Costs(tables, reader.latest_link_costs(profile_key), reader.snapshot)
        measurements = reader.records(Measurement, where={"profile_key": profile_key})
        links = reader.records(LinkMeasurement, where={"profile_key": profile_key})
    profiled = {m.module for m in measurements}
    with SpoolWriter(config.store, run.run_id, "fit") as spool:
        for table in fit_cost_tables(measurements, [s for s in family.specs() if s.module in profiled]):
            spool.append(table)
            say(
                f"cost table of `{table.module}`, tp {table.tp}: {table.num_measurements} probes, unseen ones: median "
                f"error {table.median_error_frac:.1%}, 95th percentile {table.p95_error_frac:.1%}; noise "
                f"{table.noise_frac:.1%}"
            )
        for link in fit_link_costs(links):
            spool.append(link)
    ingest(config.store)
    with Reader(config.store) as reader:
        tables = reader.latest_cost_tables(profile_key)
        if not tables:
            raise StoreError("fitted cost tables did not arrive in the store", where=str(config.store))
        return Costs(tables, reader.latest_link_costs(profile_key), reader.snapshot)


def plan_run(run: RunDir, config: Config, profile_key: str, say: Say) -> tuple[Plan, ...]:
    """Search for a plan, write the best one into the run directory and all candidates into the spool.

    Returns:
        Candidates, best first.
    """
    costs = cost_tables(run, config, profile_key, say)
    shapes, family = run.shapes(), bound_family(config)
    cost = CostModel(costs.tables, specs=family.specs(), links=costs.links, frozen=config.model.frozen)
    plans = make_plans(
        run_id=run.run_id,
        specs=used_modules(family, shapes),
        cluster=config.cluster.spec(),
        cost=cost,
        batches=sample_batches(shapes, config.plan.global_batch_size, config.plan.num_scenarios, config.train.seed),
        global_batch_size=config.plan.global_batch_size,
        snapshot_seq=costs.snapshot.seq,
        space=search_space(config),
        top=config.plan.top,
        progress=say,
    )
    used = [cost.table(m.module, m.parallel.tp, m.recompute) for m in plans[0].modules]
    run.write_plan(plans[0], used)
    # Schedulers read them from the store, those of a runner-up if somebody lets that one run.
    all_used = {
        table.table_id: table
        for plan in plans
        for table in (cost.table(m.module, m.parallel.tp, m.recompute) for m in plan.modules)
    }
    with SpoolWriter(config.store, run.run_id, "plan") as spool:
        for table in all_used.values():
            if table.source == "derived" and table not in costs.tables:
                spool.append(table)
        for plan in plans:
            spool.append(plan)
        spool.append(run_input(run.run_id, "plan", 0, costs.snapshot, run.profile_key(), used))
    return plans
