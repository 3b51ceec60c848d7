"""The planning formula: expected step time of a choice of one layout per module, without simulating.

For a number of microbatches M and S sampled global batches, with the parallel encoders e and the LLM:

    J = mean_s [ max_e fill_e[s] + fill_llm[s] + (M - 1) * max(tau_llm[s], max_e tau_e[s]) ]

tau is the slowest stage on an average microbatch, fill the time one microbatch takes through all stages, charged with
the longest single item: one lump crosses the pipeline once, while the average repeats M - 1 times. Charging the lump
in every slot mis-ranks plans by up to 1.4x. Gradient synchronisation is not part of it: nothing measures it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel, Floats, has_edge
from dflop.plan.candidates import Candidate
from dflop.plan.memory import max_stages_beyond
from dflop.plan.scenarios import ScenarioLoads
from dflop.records import LLM, ModuleSpec
from dflop.schedule.items import Ints


@dataclass(frozen=True, slots=True)
class ModuleTable:
    """One module's C candidates in the terms of the formula."""

    module: str
    tau_s: Floats
    """`[S, C]` slowest stage on an average microbatch, forward + backward."""
    fill_s: Floats
    """`[S, C]` all stages on the largest of an average microbatch and the longest item."""
    num_processes: Ints
    """`[C]`."""
    pp: Ints
    """`[C]`."""
    max_llm_pp: Floats
    """`[C]` deepest LLM pipeline under which the candidate's activations fit; infinite for the LLM itself."""


@dataclass(frozen=True, slots=True)
class FormulaTable:
    """Everything the search needs to know for one number of microbatches."""

    num_microbatches: int
    num_processes: int
    """Available."""
    modules: tuple[ModuleTable, ...]
    """Encoders first, the LLM last."""

    def objective(self, choice: Sequence[int]) -> float:
        """J in seconds of candidate `choice[m]` of module m."""
        tau_s = np.max([m.tau_s[:, c] for m, c in zip(self.modules, choice, strict=True)], axis=0)
        fills_s = [m.fill_s[:, c] for m, c in zip(self.modules, choice, strict=True)]
        fill_s = fills_s[-1] + np.max(fills_s[:-1], axis=0, initial=0.0)
        return float((fill_s + (self.num_microbatches - 1) * tau_s).mean())

    def feasible(self, choice: Sequence[int]) -> bool:
        """Whether the choice fits the processes and, through the in-flight depth, the memory."""
        picked = list(zip(self.modules, choice, strict=True))
        llm_pp = self.modules[-1].pp[choice[-1]]
        return bool(
            sum(m.num_processes[c] for m, c in picked) <= self.num_processes
            and all(llm_pp <= m.max_llm_pp[c] for m, c in picked)
        )


def module_table(
    spec: ModuleSpec,
    candidates: Sequence[Candidate],
    cost: CostModel,
    loads: ScenarioLoads,
    *,
    num_microbatches: int,
    usable_bytes: float,
) -> tuple[ModuleTable, list[Candidate]]:
    """The table of the candidates that fit in memory (behind some LLM), and those candidates."""
    kept, depth, tau, fill = [], [], [], []
    for candidate in candidates:
        buckets = num_microbatches * candidate.parallel.dp
        beyond = max_stages_beyond(
            spec,
            candidate,
            cost,
            loads.largest(buckets),
            num_microbatches=num_microbatches,
            usable_bytes=usable_bytes,
        )
        if beyond < (0 if spec.module == LLM else 1):
            continue
        average = _stage_seconds(spec, candidate, cost, loads.per_microbatch(buckets))
        lump = _stage_seconds(spec, candidate, cost, loads.longest)
        kept.append(candidate)
        depth.append(np.inf if spec.module == LLM else beyond)
        tau.append(average.max(axis=0))
        fill.append(np.maximum(average, lump).sum(axis=0))
    shape = (len(kept), loads.total.shape[1])
    table = ModuleTable(
        module=spec.module,
        tau_s=np.array(tau, dtype=float).reshape(shape).T,
        fill_s=np.array(fill, dtype=float).reshape(shape).T,
        num_processes=np.array([c.parallel.num_processes for c in kept], dtype=np.int64),
        pp=np.array([c.parallel.pp for c in kept], dtype=np.int64),
        max_llm_pp=np.array(depth, dtype=float),
    )
    return table, kept


def _stage_seconds(spec: ModuleSpec, candidate: Candidate, cost: CostModel, load: Floats) -> Floats:
    """`[pp, S]` forward + backward seconds of each stage on a `[3, S]` load."""
    layers = candidate.layers_per_stage
    stages = [
        cost.module_seconds(
            spec.module, *load, num_layers=num_layers, edge=has_edge(layers, stage), tp=candidate.parallel.tp
        )
        for stage, num_layers in enumerate(layers)
    ]
    return np.array([forward + backward for forward, backward in stages])
