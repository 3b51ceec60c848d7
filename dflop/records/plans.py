"""Where modules run, and which sample runs where in one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflop.records import RunMode
from dflop.records.costs import ParallelSpec
from dflop.records.samples import LLM


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Where and how one module runs.

    Global rank = first_rank + ((stage * dp + dp_rank) * cp + cp_rank) * tp + tp_rank.
    """

    module: str
    parallel: ParallelSpec
    first_rank: int
    layers_per_stage: tuple[int, ...]
    """0 where a stage of its grid holds none of the module's layers."""
    stage_memory_bytes: tuple[int, ...]
    """Predicted peak per process of each stage; of a grid's modules together, on its last one's entry only."""
    recompute: bool = False
    """Whether layers keep their inputs only and run again in the backward pass: all, but see `recomputed`."""
    shard_optimizer: bool = False
    """Whether data-parallel replicas share out the optimizer's states (ZeRO-1)."""
    recomputed: tuple[int, ...] = ()
    """Recomputed layers per stage, counted from its first, without layers on the host; empty where all are or none."""
    offloaded: tuple[int, ...] = ()
    """Layers per stage that keep their activations on the host; empty where none do."""
    parameter_shards: int = 1
    """Replicas that share out parameters, gradients and optimizer states, each group of so many for itself (FSDP2): 1
    is none, `dp` all of them, a number between as many copies as there are groups (HSDP)."""
    gather_s: tuple[float, ...] = ()
    """Predicted seconds of one all-gather of a stage's weights over its FSDP2 group; empty if unsharded."""
    scatter_s: tuple[float, ...] = ()
    """Predicted seconds of one reduce-scatter of a stage's gradients over its FSDP2 group; empty if unsharded."""
    max_tokens: int = 0
    """Tokens that no microbatch of one group of `cp` may exceed, for the memory's sake; 0: no cap of its own."""
    cost_growth: float = 0.0
    """By how much a token costs more for each token before it in its sample, relative to the first: context-parallel
    ranks cut their line of samples where the cost is equal, and deal out media by it. 0 without them."""
    recompute_tokens: tuple[tuple[int, ...], ...] = ()
    """Per LLM stage, ascending tokens of a microbatch of one group of `cp`: above each of them one more of
    the stage's first layers runs again. Empty: the same layers in every microbatch; otherwise `recomputed` is empty."""
    merge_tokens: int = 0
    """As `ModuleSpec.merge_tokens`, of an encoder whose items context-parallel ranks cut; 0: tiles and frames stay
    whole."""

    def num_rerun(self, stage: int, num_tokens: Any) -> Any:
        """How many of a stage's first layers are recomputed for a microbatch.

        Args:
            stage: Of the module.
            num_tokens: Of the microbatch of one group of `cp`, all its ranks together: a number or an array of them.
        """
        if not self.recompute_tokens:
            return self.num_recomputed[stage]
        return sum(num_tokens > limit for limit in self.recompute_tokens[stage])

    def recomputed_frac(self, stage: int | None = None, num_tokens: float = math.inf) -> float:
        """Share of a stage's layers, without one of all, that run again in microbatches of so many tokens."""
        if not (self.recomputed or self.recompute_tokens):
            return float(self.recompute)
        stages = range(len(self.layers_per_stage)) if stage is None else [stage]
        num_rerun: int = sum(self.num_rerun(s, num_tokens) for s in stages)
        return num_rerun / max(1, sum(self.layers_per_stage[s] for s in stages))

    @property
    def num_recomputed(self) -> tuple[int, ...]:
        """Recomputed layers per stage, at most."""
        if self.recompute_tokens:
            return tuple(map(len, self.recompute_tokens))
        return self.recomputed or tuple(n * self.recompute for n in self.layers_per_stage)

    @property
    def modes(self) -> tuple[RunMode, ...]:
        """Modes of the cost tables that the module needs: two where only some layers are recomputed."""
        shares = (False, True) if self.recomputed or self.recompute_tokens else (self.recompute,)
        return tuple(RunMode(self.parallel.tp, recompute=share) for share in shares)

    @property
    def recomputation(self) -> str:
        """What runs again in the backward pass, in words; empty where nothing."""
        if self.recomputed or self.recompute_tokens:
            most = "up to " * bool(self.recompute_tokens)
            return f"recompute {most}{sum(self.num_recomputed)}/{sum(self.layers_per_stage)}"
        return "recompute" if self.recompute else ""

    @property
    def offloading(self) -> str:
        """Whose activations are on the host, in words; empty where none are."""
        return f"offload {sum(self.offloaded)}/{sum(self.layers_per_stage)}" if self.offloaded else ""

    @property
    def sharding(self) -> str:
        """What replicas share out, in the field's words; empty where nothing."""
        if self.parameter_shards > 1:
            return "FSDP2" if self.parameter_shards == self.parallel.num_replicas else f"HSDP{self.parameter_shards}"
        return "ZeRO-1" if self.shard_optimizer else ""

    @property
    def num_meeting(self) -> int:
        """Neighbouring replicas that wait for one another in every pass: they share out parameters, or experts."""
        return max(self.parameter_shards, self.parallel.ep if self.module == LLM else 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout of the model on the cluster, with what it was predicted to take."""

    plan_id: str
    run_id: str
    candidate_rank: int
    """0 is the plan that runs; higher ranks are the runners-up, kept for the record."""
    modules: tuple[ModulePlan, ...]
    num_microbatches: int
    global_batch_size: int
    formula_step_s: float
    """By the planning formula, without simulation: what nominated it."""
    predicted_step_s: float
    """Mean simulated step with the scheduler that will run."""
    baseline_step_s: float
    """Mean simulated step of the same layout with data-blind (arrival order, equal counts) microbatches."""
    sync_s: float
    """Part of every step time here that is behind the pipeline: the slowest stage's gradient synchronisation and
    optimizer step."""
    uniform_step_s: float
    """Mean simulated step of the best data-blind plan with one layout for the whole model; NaN where none fits."""
    table_ids: tuple[str, ...]
    snapshot_seq: int
    """Store snapshot the cost tables and shapes were read from."""
    reason: str

    def module(self, name: str) -> ModulePlan:
        for m in self.modules:
            if m.module == name:
                return m
        raise KeyError(name)

    @property
    def grids(self) -> tuple[tuple[ModulePlan, ...], ...]:
        """Modules that share ranks and stages, in the order of the plan: those that begin at the same rank.

        The last module of a grid stands for it; the grid with the LLM is the last.
        """
        return grids_of(self.modules)

    def grid_of(self, module: str) -> tuple[ModulePlan, ...]:
        """The modules on the ranks of a module, itself included."""
        return next(grid for grid in self.grids if any(m.module == module for m in grid))

    @property
    def pipes(self) -> tuple[ModulePlan, ...]:
        """The module that stands for each grid: ranks and stages are its."""
        return tuple(grid[-1] for grid in self.grids)

    @property
    def apart(self) -> tuple[ModulePlan, ...]:
        """Encoders that do not share ranks with the LLM: their rows travel to it."""
        return tuple(m for grid in self.grids[:-1] for m in grid)

    def follows_samples(self, module: str) -> bool:
        """Whether a module's items are where their sample is, since it shares ranks with the LLM."""
        grid = self.grid_of(module)
        return len(grid) > 1 and grid[-1].module == LLM

    @property
    def encoders(self) -> tuple[ModulePlan, ...]:
        return tuple(m for m in self.modules if m.module != LLM)

    @property
    def num_processes(self) -> int:
        return sum(pipe.parallel.num_processes for pipe in self.pipes)

    def has_own_cores(self, max_concurrency: int) -> bool:
        """Whether each process has a core, and waits for no other process within forward and backward.

        Only then does wall time beyond compute time say that somebody else uses the cores.
        """
        alone = all(m.parallel.group_size == 1 == m.parameter_shards for m in self.modules)
        return alone and self.num_processes <= max_concurrency

    @property
    def planned_speedup(self) -> float:
        """Simulated: data-blind over balanced step of this layout, both means over batches; NaN where not simulated."""
        return self.baseline_step_s / self.predicted_step_s if self.predicted_step_s > 0 else math.nan

    @property
    def planned_speedup_over_uniform(self) -> float:
        """Simulated: best data-blind plan with one layout for the whole model over this; NaN where none is known."""
        return self.uniform_step_s / self.predicted_step_s if self.predicted_step_s > 0 else math.nan


def grids_of(modules: Sequence[ModulePlan]) -> tuple[tuple[ModulePlan, ...], ...]:
    """`Plan.grids` of such modules."""
    found: dict[int, tuple[ModulePlan, ...]] = {}
    for m in modules:
        found[m.first_rank] = (*found.pop(m.first_rank, ()), m)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class PlanProgram:
    """What is proven of all plans with one number of microbatches.

    It is proven of the planning formula, never of simulated steps. The running plan's formula value is in the plan.
    """

    run_id: str
    plan_id: str
    """The plan that the search came to, whatever its layout and number of microbatches."""
    num_microbatches: int
    num_columns: int
    """Grids near the best plan that fit in memory; of those with all modules the best ones."""
    num_columns_left: int
    """Columns that bounds leave: the binaries of the program."""
    incumbent_s: float
    """Formula value of the best plan known before; infinite where none was."""
    objective_s: float
    """Formula value of the best plan found."""
    bound_s: float
    """No plan has a smaller one."""
    gap_frac: float
    """By how much a better plan could be, of `objective_s`."""
    status: str
    """`optimal`: proven the best; `node limit`: stopped before; `bounded`: none is near the best plan of any kind, so
    it was not solved; `infeasible`: none fits."""
    process_price_s: float
    """Formula seconds that a process more saves in the relaxed program; NaN but for the best number of microbatches."""


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """Items of one module in a global batch and who owns them.

    For an encoder an item is a `MediaItem` of some sample; for the LLM an item is a whole sample.
    """

    module: str
    item_sample: tuple[int, ...]
    """Position in `StepPlan.sample_index` of the sample each item belongs to."""
    item_rank_in_sample: tuple[int, ...]
    """Which item of that sample (index into `SampleShape.items`); 0 for the LLM."""
    item_rows: tuple[int, ...]
    """Rows each item sends to the LLM (encoders) or tokens of the sample (LLM)."""
    owner: tuple[tuple[tuple[int, ...], ...], ...]
    """`owner[microbatch][dp_rank]` = item ids in packed order."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which sample runs in which microbatch on which data-parallel rank, in which order."""

    run_id: str
    step: int
    policy: str
    """Scheduling candidate that won: `arrival`, `balanced`, ..."""
    sample_index: tuple[int, ...]
    """The global batch in arrival order, as rows of the annotation file."""
    num_microbatches: int
    work: tuple[ModuleWork, ...]
    num_supervised_tokens: int
    """Loss denominator of the whole global batch."""
    predicted_step_s: float
    arrival_step_s: float
    """Simulated step of the data-blind order of the same batch."""

    def of(self, module: str) -> ModuleWork:
        for w in self.work:
            if w.module == module:
                return w
        raise KeyError(module)
