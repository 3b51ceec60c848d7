"""The planning formula: expected step time of a choice of one layout per module, without simulating.

For a number of microbatches M and S sampled global batches, with the parallel encoders e and the LLM:

    J = mean_s [ max_e fill_e[s] + fill_llm[s] + (M - 1) * max(tau_llm[s], max_e tau_e[s]) ] + max over modules of sync

tau is the slowest stage on an average microbatch, fill the time one microbatch takes through all stages, charged with
the longest single item: one lump crosses the pipeline once, while the average repeats M - 1 times. Charging the lump
in every slot mis-ranks plans by up to 1.4x. sync is gradient synchronisation and optimizer, behind the pipeline.
J over the simulated step, of 202 nominees of five models on 32 A100 (data sheet, one mixture and seed, commit 597e06a):
chains 0.90 to 1.09, median 1.00; split plans 0.58 to 1.07, median 0.94, the lowest with InternViT-6B.

Seconds of a stage are linear in its layers, so all candidates of one tp are evaluated by a few array calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import NUM_SHARD_CHOICES, Candidates, layer_and_edge_seconds, module_candidates
from dflop.plan.grid_choice import GridChoice
from dflop.plan.memory import candidate_bytes, max_stages_beyond
from dflop.plan.space import Problem
from dflop.plan.sync import candidate_sync_s
from dflop.records import LLM, ModuleSpec
from dflop.schedule.items import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTable:
    """One module's C candidates in the terms of the formula."""

    candidates: Candidates
    tau_s: Floats
    """`[S, C]` slowest stage on an average microbatch, forward + backward."""
    fill_s: Floats
    """`[S, C]` all stages on the largest of an average microbatch and the longest item."""
    sync_s: Floats
    """`[C]` gradient synchronisation and optimizer."""
    max_llm_pp: Floats
    """`[C]` deepest LLM pipeline under which the candidate's activations fit; infinite for the LLM itself."""

    @property
    def module(self) -> str:
        return self.candidates.spec.module

    @property
    def num_processes(self) -> Ints:
        return self.candidates.num_processes

    def select(self, which: Ints) -> ModuleTable:
        """The candidates at indices, in that order."""
        return ModuleTable(
            self.candidates.select(which),
            self.tau_s[:, which],
            self.fill_s[:, which],
            self.sync_s[which],
            self.max_llm_pp[which],
        )


@dataclass(frozen=True, slots=True, eq=False)
class FormulaTable:
    """Everything the search needs to know for one number of microbatches."""

    num_microbatches: int
    num_processes: int
    """Available."""
    modules: tuple[ModuleTable, ...]
    """Encoders first, the LLM last."""

    def objectives(self, choices: Ints) -> Floats:
        """J in seconds of choices `[N, modules]`; a choice's value does not hang on the others beside it."""
        columns = list(zip(self.modules, choices.T, strict=True))
        total_s = np.zeros(len(choices))
        for s in range(self.modules[-1].tau_s.shape[0]):  # in this order: sums of any other would round otherwise
            tau_s = np.max([m.tau_s[s, c] for m, c in columns], axis=0)
            fills_s = [m.fill_s[s, c] for m, c in columns]
            fill_s = fills_s[-1] + np.max(fills_s[:-1], axis=0, initial=0.0)
            total_s += fill_s + (self.num_microbatches - 1) * tau_s
        sync_s: Floats = np.max([m.sync_s[c] for m, c in columns], axis=0)
        found: Floats = total_s / self.modules[-1].tau_s.shape[0] + sync_s
        return found

    def objective(self, choice: Sequence[int]) -> float:
        """J in seconds of candidate `choice[m]` of module m."""
        return float(self.objectives(np.array([choice]))[0])

    def feasible(self, choice: Sequence[int]) -> bool:
        """Whether the choice fits the processes and, through the in-flight depth, the memory."""
        picked = list(zip(self.modules, choice, strict=True))
        llm_pp = self.modules[-1].candidates.pp[choice[-1]]
        return bool(
            sum(m.num_processes[c] for m, c in picked) <= self.num_processes
            and all(llm_pp <= m.max_llm_pp[c] for m, c in picked)
        )

    def select(self, rows: Sequence[Ints]) -> FormulaTable:
        """With the candidates at indices, per module, in that order."""
        modules = tuple(m.select(of) for m, of in zip(self.modules, rows, strict=True))
        return FormulaTable(self.num_microbatches, self.num_processes, modules)

    def grids(self, choice: Sequence[int]) -> list[GridChoice]:
        """The candidates of a choice."""
        return [m.candidates[c] for m, c in zip(self.modules, choice, strict=True)]


def formula_table(problem: Problem, num_microbatches: int) -> FormulaTable:
    """The table of every module's candidates that fit in memory.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: a module without any tp that its costs and the cluster allow.
    """
    tables = tuple(module_table(problem, spec, num_microbatches) for spec in problem.specs)
    return FormulaTable(num_microbatches, problem.cluster.num_processes, tables)


def module_table(problem: Problem, spec: ModuleSpec, num_microbatches: int) -> ModuleTable:
    """The table of the candidates of one module that fit in memory behind some LLM.

    A candidate that recomputes or shares out parameters is kept where the same one that does less of it has to stand
    before a less deep LLM, or does not fit at all; else it is slower for nothing.
    """
    every = module_candidates(problem, spec, num_microbatches)
    loads = problem.loads[spec.module]
    buckets, which = np.unique(num_microbatches * every.dp, return_inverse=True)
    beyond = max_stages_beyond(
        candidate_bytes(
            every,
            problem.cost,
            loads.largest(buckets)[:, which],
        ),
        every.pp,
        num_microbatches=num_microbatches,
        usable_bytes=problem.usable_bytes,
    )
    if spec.module == LLM:
        beyond = np.where(beyond < 0, -1.0, np.inf)
    keep = (beyond >= 1) & (beyond > _with_less(every, beyond))
    kept = every.select(keep)
    tau_s, fill_s = _pipeline_seconds(kept, problem, num_microbatches)
    return ModuleTable(kept, tau_s, fill_s, candidate_sync_s(kept, problem, num_microbatches), beyond[keep])


def _with_less(candidates: Candidates, beyond: Floats) -> Floats:
    """`[C]`: the deepest of `beyond` of the same degrees that save less memory; -1 where none is among the candidates.

    That is without recomputation in the same groups, or in smaller groups with the same recomputation.
    """
    tp, pp, dp, shards, again = candidates.content[:, :5].T
    _, group = np.unique((tp << 40) + (pp << 20) + dp, return_inverse=True)
    place = np.where(shards == 1, 0, np.where(shards == dp, 2, 1))  # of `NUM_SHARD_CHOICES`, the fewer the sooner
    known = np.full((len(group), NUM_SHARD_CHOICES + 1, 2), -1.0)
    known[group, place + 1, again] = beyond
    with_fewer = np.maximum.accumulate(known, axis=1)[group, place, again]
    found: Floats = np.where(again == 1, np.maximum(with_fewer, known[group, place + 1, 0]), with_fewer)
    return found


def _pipeline_seconds(candidates: Candidates, problem: Problem, num_microbatches: int) -> tuple[Floats, Floats]:
    """(tau, fill), each `[S, C]`."""
    module, loads = candidates.spec.module, problem.loads[candidates.spec.module]
    num_scenarios = loads.total.shape[1]
    tau_s, fill_s = (np.zeros((num_scenarios, len(candidates))) for _ in range(2))
    for tp, recompute, rows in candidates.groups():
        replicas, which = np.unique(candidates.dp[rows], return_inverse=True)
        average = loads.per_microbatch(num_microbatches * replicas)
        seconds = functools.partial(layer_and_edge_seconds, problem.cost, module, tp=tp, recompute=recompute)
        layer_s, edge_s = (part[which].T for part in seconds(average))
        lump_s, lump_edge_s = (part[:, np.newaxis] for part in seconds(loads.longest))
        last, widest = candidates.last[rows], candidates.widest[rows]
        last_s = last * layer_s + edge_s
        tau_s[:, rows] = np.maximum(widest * layer_s, last_s)
        others = candidates.spec.num_layers - last
        fill_s[:, rows] = others * np.maximum(layer_s, lump_s) + np.maximum(last_s, last * lump_s + lump_edge_s)
    return tau_s, fill_s
