"""The plan: formula to find candidates, simulator with the real scheduler to rank them.

Per number of microbatches the mixed-integer program gives the formula's optimum and enumeration its neighbours; each
is then scheduled and simulated on the sampled global batches. The re-rank is not optional: the formula is within
0.7-1.3x of the simulator, does not see contention for cores, and only the simulator knows what the scheduler makes
of a layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop import units
from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import Candidate, check_processes, module_candidates
from dflop.plan.enumerate import MAX_CHOICES, best_choices, num_choices
from dflop.plan.formula import FormulaTable, module_table
from dflop.plan.infeasible import explain
from dflop.plan.memory import USABLE_MEMORY_FRAC, stage_memory_bytes
from dflop.plan.milp import solve_milp
from dflop.plan.scenarios import ScenarioLoads, scenario_loads
from dflop.records import LLM, ClusterSpec, ModuleLoad, ModulePlan, ModuleSpec, Plan, SampleShape, StepPlan, to_dict
from dflop.schedule.items import module_items, owner_loads
from dflop.schedule.scheduler import schedule_step

Layout = Mapping[str, Candidate]


def make_plans(
    *,
    run_id: str,
    specs: Sequence[ModuleSpec],
    cluster: ClusterSpec,
    cost: CostModel,
    batches: Sequence[Sequence[SampleShape]],
    global_batch_size: int,
    microbatch_choices: Sequence[int],
    snapshot_seq: int,
    top: int = 12,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, ...]:
    """At most `top` plans, best first by simulated step time; the first is the one to run.

    Args:
        run_id: Copied into the plans.
        specs: Encoders first, `llm` last.
        cluster: Processes, memory, cores. A plan may use fewer processes than there are.
        cost: Tables for every module. The search looks at microbatches far larger than any probe, and what it would
            refuse to predict it could not compare: it extrapolates, and says so of the best plan.
        batches: Sampled global batches, at least one.
        global_batch_size: Samples per step.
        microbatch_choices: Numbers of microbatches to try; those above the batch size are skipped.
        snapshot_seq: Copied into the plans.
        top: Plans to simulate per run, at least one per number of microbatches.
        progress: Told what happens, one line each.

    Raises:
        InfeasiblePlanError: no layout fits; the message names the binding limit and the nearest fix.
        CostError: a module without a cost table.
    """
    check_processes([s.module for s in specs], cluster.num_processes)
    cost = cost.extrapolating()
    search = _Search(run_id, tuple(specs), cluster, cost, tuple(batches), global_batch_size, snapshot_seq)
    tell = progress or (lambda _: None)
    counts = sorted(m for m in set(microbatch_choices) if 1 <= m <= global_batch_size)
    if not counts:
        raise InfeasiblePlanError(
            f"no number of microbatches in {sorted(microbatch_choices)} is between 1 and the global batch of "
            f"{global_batch_size} samples",
            hint="raise the global batch size or allow fewer microbatches",
        )
    loads = {s.module: scenario_loads(batches, s.module) for s in specs}
    candidates = {m: search.candidates(m, loads) for m in counts}
    drafts: list[Plan] = []
    for m in counts:
        found = search.drafts(m, loads, candidates[m], top=-(-top // len(counts)))
        tell(f"{m} microbatches: {len(found)} layouts kept" if found else f"{m} microbatches: nothing fits")
        drafts += found
    plans = [plan for plan in map(search.simulated, drafts) if plan is not None]
    tell(f"simulated {len(drafts)} plans on {len(batches)} global batches, {len(plans)} fit in memory")
    if not plans:
        raise explain(specs, cluster, cost, loads, candidates)
    plans.sort(key=lambda p: (p.predicted_step_s, p.num_processes, p.plan_id))
    for line in _extrapolated(plans[0], cost, loads):
        tell(line)
    return tuple(
        dataclasses.replace(plan, candidate_rank=rank, reason=_reason(plan, plans, rank))
        for rank, plan in enumerate(plans[:top])
    )


@dataclass(frozen=True, slots=True)
class _Search:
    run_id: str
    specs: tuple[ModuleSpec, ...]
    cluster: ClusterSpec
    cost: CostModel
    batches: tuple[Sequence[SampleShape], ...]
    global_batch_size: int
    snapshot_seq: int

    @property
    def usable_bytes(self) -> float:
        return USABLE_MEMORY_FRAC * self.cluster.memory_per_process_bytes

    def candidates(self, m: int, loads: Mapping[str, ScenarioLoads]) -> dict[str, list[Candidate]]:
        """Layouts of each module under `m` microbatches, memory not yet considered."""
        return {
            spec.module: module_candidates(
                spec,
                self.cost,
                max_processes=self.cluster.num_processes - len(self.specs) + 1,
                max_dp=self.global_batch_size // (m if spec.module == LLM else 1),
                typical=loads[spec.module].typical(m),
            )
            for spec in self.specs
        }

    def drafts(
        self, m: int, loads: Mapping[str, ScenarioLoads], candidates: Mapping[str, list[Candidate]], top: int
    ) -> list[Plan]:
        """The formula's best layouts under `m` microbatches as plans without simulated times."""
        built = [
            module_table(
                spec,
                candidates[spec.module],
                self.cost,
                loads[spec.module],
                num_microbatches=m,
                usable_bytes=self.usable_bytes,
            )
            for spec in self.specs
        ]
        table = FormulaTable(m, self.cluster.num_processes, tuple(t for t, _ in built))
        optimum = solve_milp(table)
        if optimum is None:
            return []
        choices = [optimum]
        if num_choices(table) <= MAX_CHOICES:
            choices += [choice for _, choice in best_choices(table, top)]
        drafts = []
        for choice in list(dict.fromkeys(choices))[:top]:
            layout = {s.module: kept[c] for s, (_, kept), c in zip(self.specs, built, choice, strict=True)}
            largest = {name: loads[name].largest(m * c.parallel.dp) for name, c in layout.items()}
            drafts.append(self._draft(m, layout, largest, table.objective(choice)))
        return drafts

    def simulated(self, draft: Plan) -> Plan | None:
        """The draft with its mean simulated step times; None if its schedules turn out not to fit in memory."""
        limit = self.cluster.max_concurrency
        steps = [
            schedule_step(
                run_id=self.run_id,
                step=step,
                plan=draft,
                batch=batch,
                cost=self.cost,
                max_concurrency=limit if limit < draft.num_processes else None,
            )
            for step, batch in enumerate(self.batches)
        ]
        seen = self._memory(draft, _largest_seen(draft, steps, self.batches))
        if max(max(peaks) for peaks in seen.values()) > self.usable_bytes:
            return None
        expected = {m.module: m.stage_memory_bytes for m in draft.modules}
        peaks = {name: tuple(np.maximum(expected[name], seen[name]).tolist()) for name in seen}
        return dataclasses.replace(
            draft,
            modules=tuple(dataclasses.replace(m, stage_memory_bytes=peaks[m.module]) for m in draft.modules),
            predicted_step_s=statistics.fmean(s.predicted_step_s for s in steps),
            baseline_step_s=statistics.fmean(s.arrival_step_s for s in steps),
        )

    def _draft(self, m: int, layout: Layout, largest: Mapping[str, ModuleLoad], formula_s: float) -> Plan:
        modules, first_rank = [], 0
        for spec in self.specs:
            candidate = layout[spec.module]
            modules.append(ModulePlan(spec.module, candidate.parallel, first_rank, candidate.layers_per_stage, ()))
            first_rank += candidate.parallel.num_processes
        tables = [self.cost.table(p.module, p.parallel.tp).table_id for p in modules]
        content = {
            "modules": [to_dict(p) for p in modules],
            "num_microbatches": m,
            "global_batch_size": self.global_batch_size,
            "table_ids": tables,
            "corrections": self.cost.corrections,
        }
        plan = Plan(
            plan_id=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
            run_id=self.run_id,
            candidate_rank=-1,
            layout="split",
            modules=tuple(modules),
            num_microbatches=m,
            global_batch_size=self.global_batch_size,
            formula_step_s=formula_s,
            predicted_step_s=float("nan"),
            baseline_step_s=float("nan"),
            table_ids=tuple(tables),
            snapshot_seq=self.snapshot_seq,
            reason="",
        )
        memory = self._memory(plan, largest)
        return dataclasses.replace(
            plan, modules=tuple(dataclasses.replace(p, stage_memory_bytes=memory[p.module]) for p in modules)
        )

    def _memory(self, plan: Plan, largest: Mapping[str, ModuleLoad]) -> dict[str, tuple[int, ...]]:
        found = {}
        for spec in self.specs:
            placed = plan.module(spec.module)
            found[spec.module] = stage_memory_bytes(
                spec,
                Candidate(placed.parallel, placed.layers_per_stage),
                self.cost,
                largest[spec.module],
                num_microbatches=plan.num_microbatches,
                num_stages_beyond=0 if spec.module == LLM else plan.module(LLM).parallel.pp,
            )
        return found


def _largest_seen(
    plan: Plan, steps: Sequence[StepPlan], batches: Sequence[Sequence[SampleShape]]
) -> dict[str, ModuleLoad]:
    """Per module, the largest microbatch of one rank in the simulated schedules, each component on its own."""
    found = {}
    for m in plan.modules:
        peaks = [
            [int(part.max()) for part in owner_loads(module_items(batch, m.module), step.of(m.module).owner)]
            for step, batch in zip(steps, batches, strict=True)
        ]
        found[m.module] = ModuleLoad(*(int(part) for part in np.max(peaks, axis=0)))
    return found


def _extrapolated(plan: Plan, cost: CostModel, loads: Mapping[str, ScenarioLoads]) -> list[str]:
    """A line per module whose average microbatch has more tokens than any probe had."""
    found = []
    for m in plan.modules:
        tokens = loads[m.module].typical(plan.num_microbatches * m.parallel.dp).num_tokens
        probed = cost.table(m.module, m.parallel.tp).max_tokens
        if probed and tokens > probed:
            found.append(
                f"`{m.module}`: an average microbatch has {tokens} tokens, the largest probe had {probed}; "
                "its times are extrapolated"
            )
    return found


def _reason(plan: Plan, plans: Sequence[Plan], rank: int) -> str:
    if rank > 0:
        return f"{units.ratio(plan.predicted_step_s / plans[0].predicted_step_s)} the step time of the best plan"
    saved_frac = 1.0 - plan.predicted_step_s / plan.baseline_step_s
    gain = (
        f"packing takes {units.percent(saved_frac)} off its data-blind step of {units.seconds(plan.baseline_step_s)}"
        if saved_frac >= 0.01
        else "packing gains nothing over the data-blind order on this data"
    )
    split = ", ".join(f"{m.module} {m.parallel.num_processes}" for m in plan.modules)
    return (
        f"fastest of {len(plans)} simulated plans at {units.seconds(plan.predicted_step_s)} per step with "
        f"{plan.num_microbatches} microbatches and processes {split}; {gain}"
    )
