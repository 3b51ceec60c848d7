"""From the store to a plan: fit cost tables where they are missing, sample the data, search, write the plan down."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflop.config import Config
from dflop.cost.analytic import with_sheet_links
from dflop.cost.devices import sheet_of
from dflop.cost.fit import fit_cost_tables, missing_probes
from dflop.cost.link_costs import HOST_COPY, LinkModel, fit_link_costs
from dflop.cost.model import CostModel
from dflop.cost.tensor_parallel import DERIVED
from dflop.errors import ConfigError, StoreError
from dflop.learn.cost_inputs import factors_in_force, run_input
from dflop.models.family import Family
from dflop.plan.drafts import holding
from dflop.plan.search import Planned, optimize
from dflop.plan.space import Problem, SearchSpace
from dflop.plan.worst import without_beyond
from dflop.profile.groups import used_modules
from dflop.profile.hardware import PROBES_VERSION, hardware_name, software_name
from dflop.records import (
    FP8_OFF,
    ClusterSpec,
    CostTable,
    LinkCost,
    LinkMeasurement,
    Measurement,
    ModuleFactors,
    ModuleSpec,
    Plan,
    PlanProgram,
    RunInput,
    SampleShape,
)
from dflop.run.batches import GlobalBatches, profiled_ways, stage_at
from dflop.run.directory import RunDir, family_of, tokenizer_of
from dflop.run.messages import Meter, Say
from dflop.run.plan_scope import Batches, PlanBasis, factors_text, planned_steps, scenario_batches, write_basis
from dflop.steps.preflight import check_context_parallel, check_expert_parallel
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.snapshot import Current
from dflop.store.spool import spool_rows
from dflop.train.parameter_groups import MUON

SAMPLES_PER_GPU = 8
"""Samples of a global batch per GPU: enough for several microbatches that balance samples of all sizes."""


def bound_family(config: Config) -> Family:
    """The run's family with the vocabulary of the dataset's tokenizer."""
    return family_of(config, tokenizer_of(config).vocab_size)


def model_profile_key(config: Config) -> tuple[str, str, dict[str, object]]:
    """(key, hardware, inputs) of the model profile: same model, hardware, software and settings, same key."""
    hardware = hardware_name(config.cluster.device, config.cluster.hardware)
    inputs: dict[str, object] = {
        "family": config.model.family,
        "rules_key": bound_family(config).rules_key,
        "dtype": config.model.dtype,
        "attention": config.model.attention,
        "hardware": hardware,
        "software": software_name(),
        "probes": PROBES_VERSION,
        **({"compile": "every module"} if config.train.compile else {}),
        **({"fp8": config.train.fp8} if config.train.fp8 != FP8_OFF else {}),
        "settings": config.model_profile.model_dump(mode="json") | {"ways": list(profiled_ways(config))},
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return key, hardware, inputs


@dataclass(frozen=True, slots=True)
class Gap:
    """A cost table that a model profile does not determine."""

    module: str
    tp: int
    is_unprobed: bool
    """Whether nobody has probed the module at that degree: the data of earlier runs had nothing for it."""
    missing: str


def profile_gaps(config: Config, profile_key: str, specs: Sequence[ModuleSpec]) -> list[Gap]:
    """Tables of modules that are neither in the store nor determined by what is measured under a profile's key."""
    wanted = [(spec.module, tp) for tp in config.model_profile.tp for spec in specs if tp in spec.tp_choices]
    ways = [(name == "recompute", name == "frozen") for name in profiled_ways(config)]
    with Reader(config.store) as reader:
        tables = {(table.module, table.tp) for table in reader.latest_cost_tables(profile_key)}
        probes = reader.records(Measurement, where={"profile_key": profile_key})
    own = {which: [m for m in probes if (m.module, m.tp) == which] for which in wanted if which not in tables}
    return [Gap(*which, not ms, missing) for which, ms in own.items() if (missing := missing_probes(ms, ways))]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan is made from."""

    tables: list[CostTable]
    links: list[LinkCost]
    profile_key: str = ""
    """Model profile that they were measured for, whose corrections apply; empty: of a data sheet."""
    snapshot: Current | None = None
    """Where they were read."""


def cost_tables(run_id: str, config: Config, profile_key: str, specs: Sequence[ModuleSpec], say: Say) -> Costs:
    """Cost tables and link costs of a finished model profile, fitted and stored first where there are none.

    Raises:
        StoreError: they cannot be written or read.
    """
    with Reader(config.store) as reader:
        tables, known = reader.latest_cost_tables(profile_key), reader.latest_link_costs(profile_key)
        fitted = {(table.module, table.tp) for table in tables}
        where = {"profile_key": profile_key}
        probes = reader.records(Measurement, where=where | {"module": [spec.module for spec in specs]})
        measurements = [m for m in probes if (m.module, m.tp) not in fitted]
        if tables and not measurements:
            return Costs(tables, known, profile_key, reader.snapshot)
        links = [] if known else reader.records(LinkMeasurement, where=where)
    fitted_specs = [spec for spec in specs if spec.module in {m.module for m in measurements}]
    new = [replace(t, fitted_at_s=time.time()) for t in fit_cost_tables(measurements, fitted_specs)]
    spool_rows(
        config.store, run_id, "fit", (*new, *(replace(c, fitted_at_s=time.time()) for c in fit_link_costs(links)))
    )
    for table in new:
        say(
            f"cost table of `{table.module}`, tp {table.tp}: {table.num_measurements} probes, held-out error: "
            f"median {table.median_error_frac:.1%}, 95th percentile {table.p95_error_frac:.1%}; noise "
            f"{table.noise_frac:.1%}"
        )
    ingest(config.store)
    with Reader(config.store) as reader:
        tables = reader.latest_cost_tables(profile_key)
        if not tables:
            raise StoreError("fitted cost tables are missing in the store", where=str(config.store))
        return Costs(tables, reader.latest_link_costs(profile_key), profile_key, reader.snapshot)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned for, and where all of it comes from."""

    problem: Problem
    basis: PlanBasis
    """Without a plan id: there is no plan yet."""
    costs: Costs
    later: Batches
    """Batches of steps after the horizon, which must fit in memory; empty where the plan is for all steps."""

    @property
    def corrections_text(self) -> str:
        """Corrections in force, in a few words; empty where there are none to speak of."""
        return factors_text({f.module: f for f in self.basis.factors})


def run_task(run: RunDir, config: Config, profile_key: str, say: Say, *, from_step: int | None = None) -> Task:
    """What a run is to be planned for, as of `planning_task`: its shapes are in its directory."""
    shapes = run.shapes()
    if config.validation.is_wanted:
        GlobalBatches(config, shapes)  # before anything is measured: whether there is enough to hold out
    with Reader(config.store) as reader:
        worst = reader.largest_samples(run.profile_key())
    specs = used_modules(bound_family(config), shapes)
    costs = cost_tables(run.run_id, config, profile_key, specs, say)
    return planning_task(run.run_id, config, specs, costs, shapes, worst, from_step=from_step)


def planning_task(
    run_id: str, config: Config, specs: Sequence[ModuleSpec], costs: Costs, shapes: Sequence[SampleShape],
    worst: Sequence[SampleShape], *, cluster: ClusterSpec | None = None, from_step: int | None = None,
) -> Task:  # fmt: skip
    """Costs as corrected by whatever has run so far, and batches of the steps that a plan is for.

    The problem of a configuration is made here alone: for runs, `dflop plan` and `dflop compare`.

    Args:
        run_id: Of the plans.
        config: What to plan.
        specs: Modules that the samples use.
        costs: As measured or by a data sheet.
        shapes: Samples that batches are drawn from.
        worst: The largest samples of the data profile.
        cluster: To plan for; None: that of the configuration.
        from_step: Where a plan begins to run; None: before anything has run.

    Raises:
        ConfigError: the configuration asks for context or expert parallelism that no plan of the model can have.
    """
    first, num_steps = planned_steps(config, from_step)
    wanted, stage = config.plan, stage_at(config, first)
    has_adapters, is_muon = config.train.lora is not None, config.train.optimizer == MUON
    tables = [table for table in costs.tables if table.source != DERIVED]  # they may be older than what they are of
    family = bound_family(config)
    check_context_parallel(config, family, (cluster or config.cluster.spec()).num_processes_per_node)
    check_expert_parallel(config, family)
    every = _as_trained(config, family)
    specs = tuple(spec for spec in every if spec.module in {used.module for used in specs})
    adapted = config.train.lora.targets if config.train.lora is not None else ()
    target = cluster or config.cluster.spec()
    links = with_sheet_links(
        costs.links, sheet_of(tables[0].hardware), num_nodes=target.num_nodes + 1,  # as explanations ask
        num_processes_per_node=target.num_processes_per_node,
    )  # fmt: skip
    cost = CostModel(tables, specs=every, links=links, frozen=stage.frozen, adapted=tuple(adapted), extrapolate=True)
    if costs.profile_key and config.correct.enabled:
        with Reader(config.store) as reader:
            known = factors_in_force(reader, cost, costs.profile_key, config.correct.half_life_days)
        cost = cost.with_corrections(known)
    problem = Problem(
        run_id=run_id,
        specs=tuple(specs),
        cluster=target,
        cost=cost,
        batches=scenario_batches(config, shapes, first, num_steps),
        global_batch_size=wanted.global_batch_size,
        snapshot_seq=costs.snapshot.seq if costs.snapshot else 0,
        space=SearchSpace(
            share_ranks=wanted.share_ranks,
            cps=wanted.context_parallel or None,
            whole_samples=family.whole_samples,
            eps=wanted.expert_parallel or ((1,) if has_adapters else None),
            recompute=wanted.recompute,
            shard_optimizer=wanted.shard_optimizer,
            shard_parameters=(False,) if is_muon else wanted.shard_parameters,
            host_bytes=wanted.offload_gib_per_process * 2**30,
            host_bytes_per_s=_host_bytes_per_s(config, cost, target),
            microbatches=wanted.microbatch_choices,
        ),
        worst_samples=tuple(worst),
    ).levelled()
    factors = tuple(f for f in problem.cost.corrections.values() if isinstance(f, ModuleFactors))
    left = stage.end_step - first
    later = scenario_batches(config, shapes, first, left) if 0 < num_steps < left else ()
    return Task(problem, PlanBasis("", first, num_steps, stage.frozen, factors), costs, later)


def _host_bytes_per_s(config: Config, cost: CostModel, cluster: ClusterSpec) -> float:
    """Rate of copies between a device and the host: configured, profiled, or of the data sheet; 0 where none are made.

    Raises:
        ConfigError: none of the three is known.
    """
    wanted = config.plan
    if not wanted.offload_gib_per_process:
        return 0.0
    if wanted.offload_gb_per_s is not None:
        return wanted.offload_gb_per_s * 1e9
    _, s_per_byte = LinkModel(cost.links).line(HOST_COPY, cluster.num_processes_per_node, 1)
    if not s_per_byte:
        raise ConfigError(
            f"plan.offload_gib_per_process is {wanted.offload_gib_per_process:g}, but the rate of copies is not known: "
            f"`{cost.tables[0].hardware}` has no data sheet, and no profile timed them",
            where="plan.offload_gb_per_s",
            hint="set it, or profile the GPUs of a node: dflop profile CONFIG",
        )
    return 1 / s_per_byte


def _as_trained(config: Config, family: Family) -> tuple[ModuleSpec, ...]:
    """The family's specs with what training keeps, matrices whole for Muon, and the adapters of `train.lora`.

    The model tells the sizes of adapters.
    """
    specs, drops = family.specs(), False
    if config.train.lora is not None:
        from dflop.models.adapter_specs import adapted_specs  # with torch, which plans do not need otherwise

        specs, drops = adapted_specs(family, config.train.lora, config.model.dtype), config.train.lora.dropout > 0
    if config.train.optimizer == MUON:
        specs = tuple(replace(spec, tp_choices=(1,)) for spec in specs)
    keeps = config.train.ema_decay > 0
    return tuple(replace(spec, keeps_average=keeps, has_adapter_dropout=drops) for spec in specs)


def find_plans(task: Task, config: Config, say: Say) -> Planned:
    """Candidates, best first, and what is proven; the best one's reason says what its costs were corrected by.

    Raises:
        InfeasiblePlanError: no layout fits.
    """
    planned = optimize(task.problem, top=config.plan.top, progress=say, at=Meter(say))
    if task.later:
        planned = _holding_what_is_later(task, planned, config, say)
    if not (corrected := task.corrections_text):
        return planned
    best, *others = planned.plans
    return replace(planned, plans=(replace(best, reason=f"{best.reason} {corrected}"), *others))


def _holding_what_is_later(task: Task, planned: Planned, config: Config, say: Say) -> Planned:
    """Plans with room for batches behind the horizon; where none has, those that are best for all of them."""
    problem, plans = without_beyond(task.problem, planned.plans[0]), planned.plans
    everything = replace(problem, batches=(*problem.batches, *task.later))
    found = [held for plan in plans if (held := holding(everything, plan)) is not None]
    if not found:
        say("no plan for the next steps fits later samples: planning for all samples")
        return optimize(everything, top=config.plan.top, progress=say, at=Meter(say))
    if found[0].plan_id != plans[0].plan_id:
        say("faster plans for the next steps do not fit later samples")
    return replace(planned, plans=tuple(replace(plan, candidate_rank=place) for place, plan in enumerate(found)))


def keep_plans(
    run: RunDir, config: Config, task: Task, plans: Sequence[Plan], programs: Sequence[PlanProgram] = ()
) -> None:
    """Write the best plan into the run directory, and all candidates and what is proven into the spool."""
    used, snapshot = tables_of(plans[0], task.problem.cost), task.costs.snapshot
    assert snapshot is not None, "a run trains on measured costs"
    write_basis(run, replace(task.basis, plan_id=plans[0].plan_id, terms=task.problem.terms(plans[0])))
    run.write_plan(plans[0], used)
    proven = (replace(program, plan_id=plans[0].plan_id) for program in programs)
    spool_plans(config, task, plans, *proven, run_input(run.run_id, "plan", 0, snapshot, run.profile_key(), used))


def spool_plans(config: Config, task: Task, plans: Sequence[Plan], *others: PlanProgram | RunInput) -> None:
    """Write plans and other rows into the spool, and cost tables of the plans that are not in the store.

    Schedulers read them from the store, those of a runner-up if somebody lets that one run.
    """
    used = {table.table_id: table for plan in plans for table in tables_of(plan, task.problem.cost)}
    is_stored = set() if task.costs.snapshot is None else {table.table_id for table in task.costs.tables}
    tables = (t for t in used.values() if t.source != "measured" and t.table_id not in is_stored)
    spool_rows(config.store, task.problem.run_id, "plan", (*tables, *plans, *others))


def tables_of(plan: Plan, cost: CostModel) -> list[CostTable]:
    """The cost tables that a plan was made with, of each module those of its ways to run."""
    return [cost.table(m.module, mode) for m in plan.modules for mode in m.modes]


def batch_note(config: Config, num_processes: int) -> str:
    """What is wrong with the size of a global batch for so many processes; empty: nothing."""
    batch, each = config.plan.global_batch_size, SAMPLES_PER_GPU
    if batch >= num_processes:
        return ""
    return (
        f"plan.global_batch_size is {batch} for {num_processes} processes: with fewer samples than processes most "
        f"of them work in a pipeline or idle; with --set plan.global_batch_size={each * num_processes} each has "
        f"{each}"
    )


def plan_run(
    run: RunDir, config: Config, profile_key: str, say: Say, *, from_step: int | None = None
) -> tuple[Plan, ...]:
    """Candidates, best first, as of `run_task`; the best one in the run directory, all of them in the spool."""
    if note := batch_note(config, config.cluster.spec().num_processes):
        say(note)
    task = run_task(run, config, profile_key, say, from_step=from_step)
    planned = find_plans(task, config, say)
    keep_plans(run, config, task, planned.plans, planned.programs)
    return planned.plans
