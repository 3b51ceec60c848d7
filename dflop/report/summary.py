"""Everything a person wants to know about a run, computed once and shown three ways (terminal, Prefect, HTML).

Measured and simulated numbers never mix in one field. Sums and means follow the views `v_stage_idle` and `v_step`, so
that a number here can be found again with SQL.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dflop.records import (
    ClusterSpec,
    Correction,
    JobRecord,
    Plan,
    QuarantinedSample,
    RankFactor,
    RankMemory,
    RunInput,
    RunRecord,
    StepFlops,
    StepObservation,
    StepPlan,
)
from dflop.records.speedup import NOT_COMPARED, Speedup
from dflop.report.comparison import Comparison, compare_policies, verdict
from dflop.report.history_table import HistoryEntry
from dflop.report.observed_steps import MeasuredStep, measured_steps
from dflop.report.stage_stats import StageStats, stage_stats

LOSS_WINDOW = 3
"""Steps averaged for the first and the last loss: single steps are different samples, not progress."""


@dataclass(frozen=True, slots=True)
class RunDetails:
    """Records and texts that only the page shows. Every part may be empty: the page then says that it is."""

    history: tuple[HistoryEntry, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """(name, value) of what ran: model, dataset, stages."""
    compare_plans: tuple[StepPlan, ...] = ()
    """Of the comparison."""
    corrections: tuple[Correction, ...] = ()
    """All sets, in any order."""
    rank_factors: tuple[RankFactor, ...] = ()
    peaks: tuple[RankMemory, ...] = ()
    """Of training."""
    flops: tuple[StepFlops, ...] = ()
    """Of training."""
    jobs: tuple[JobRecord, ...] = ()
    inputs: tuple[RunInput, ...] = ()
    cost_sources: tuple[tuple[str, str], ...] = ()
    """(module with its degree, `measured`, `derived` or `analytic`)."""
    num_steps_planned: int | None = None
    """Of the whole training."""
    config_text: str = ""
    """YAML with every default filled in."""

    @property
    def plan_steps(self) -> tuple[int, ...]:
        """Steps at which the run went on under another plan."""
        return tuple(e.step for e in self.history if e.kind == "plan" and e.step is not None)


NOTHING = RunDetails()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A finished (or interrupted) run."""

    run: RunRecord
    plan: Plan
    candidates: tuple[Plan, ...]
    """By rank, the plan that ran first."""
    num_cores: int | None
    """Cores the processes share; None when each has a device of its own."""
    memory_limit_bytes: int
    """Of a process."""
    steps: tuple[MeasuredStep, ...]
    """Training steps."""
    first_loss: float
    last_loss: float
    step_s: float
    """Median, measured."""
    data_wait_s: float
    """Median wait for input before a step."""
    idle_frac: float
    """Mean, measured."""
    llm_tokens_per_s: float
    stages: tuple[StageStats, ...]
    comparison: Comparison | None
    verdict: str
    quarantined: tuple[QuarantinedSample, ...]
    warning: str
    """Of samples that the profile called good and training could not use; empty where there are none."""
    corrections: tuple[Correction, ...]
    """The last set of each module, in the order of their steps; the buckets of a set by size."""
    num_corrections: int
    """Sets."""
    details: RunDetails


def summarise(
    *,
    run: RunRecord,
    cluster: ClusterSpec,
    plan: Plan,
    candidates: Sequence[Plan] = (),
    train: Sequence[StepObservation],
    compare: Sequence[StepObservation] = (),
    speedups: tuple[Speedup, Speedup] = (NOT_COMPARED, NOT_COMPARED),
    quarantined: Sequence[QuarantinedSample] = (),
    details: RunDetails = NOTHING,
) -> RunSummary:
    """Summary of one run from its records; every part but `run`, `cluster` and `plan` may be empty.

    Args:
        run: Its latest state.
        cluster: Where it ran; tells whether processes share cores.
        plan: The plan that ran.
        candidates: All plans of the run, for the record.
        train: Observations of the training job, all ranks and attempts.
        compare: Observations of the comparison job (`<run_id>/compare`), warm-up included.
        speedups: Measured and simulated, of the view `v_speedup`.
        quarantined: Samples left out, by profile or training.
        details: What else is known, step plans of the comparison and corrections among it.
    """
    steps = measured_steps(train)
    comparison = compare_policies(measured_steps(compare), details.compare_plans, *speedups)
    num_cores = cluster.max_concurrency if cluster.device == "cpu" else None
    sets = _correction_sets(details.corrections)
    latest = {rows[0].module: rows for rows in sets}
    losses = [s.loss for s in steps if s.loss is not None]
    num_lost, warning = _lost(quarantined)
    lost = f" Training lost {num_lost} sample(s) that the data profile called good." if num_lost else ""
    return RunSummary(
        run=run,
        plan=plan,
        candidates=tuple(sorted(candidates, key=lambda p: p.candidate_rank)) or (plan,),
        num_cores=num_cores,
        memory_limit_bytes=cluster.memory_per_process_bytes,
        steps=steps,
        first_loss=_mean(losses[:LOSS_WINDOW]),
        last_loss=_mean(losses[-LOSS_WINDOW:]),
        step_s=_median([s.step_s for s in steps]),
        data_wait_s=_median([s.data_wait_s for s in steps]),
        idle_frac=_mean([s.idle_frac for s in steps]),
        llm_tokens_per_s=_median([s.llm_tokens_per_s for s in steps]),
        stages=stage_stats(steps, plan),
        comparison=comparison,
        verdict=verdict(comparison, num_processes=plan.num_processes, num_cores=num_cores) + lost,
        quarantined=tuple(sorted(quarantined, key=lambda q: (q.sample_index, q.phase, q.path))),
        warning=warning,
        corrections=tuple(c for rows in sets if rows is latest[rows[0].module] for c in rows),
        num_corrections=len(sets),
        details=details,
    )


def _lost(quarantined: Sequence[QuarantinedSample]) -> tuple[int, str]:
    """How many samples only training found to be bad, and the warning that names the first."""
    found = sorted((q for q in quarantined if q.phase == "train"), key=lambda q: (q.sample_index, q.path))
    if not found:
        return 0, ""
    first, num_lost = found[0], len({q.sample_index for q in found})
    return num_lost, (
        f"Warning: {num_lost} sample(s) that the data profile called good were not trained on, first "
        f"`{first.sample_id}` ({first.path or 'no path'}): {first.reason}. All: select * from v_quarantine"
    )


def _correction_sets(corrections: Sequence[Correction]) -> list[list[Correction]]:
    """Rows that were written together, in the order of their steps, within each by size."""
    found: dict[tuple[int, str, float, str], list[Correction]] = {}
    for c in sorted(corrections, key=lambda c: (c.effective_step, c.observed_at_s, c.module, c.min_tokens)):
        found.setdefault((c.effective_step, c.module, c.observed_at_s, c.table_id), []).append(c)
    return list(found.values())


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _median(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan
