"""Everything a person wants to know about a run, computed once and shown three ways (terminal, Prefect, HTML).

Measured and simulated numbers never mix in one field. Sums and means follow the views `v_stage_idle` and `v_step`, so
that a number here can be found again with SQL.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dflop.records import ClusterSpec, Correction, Plan, QuarantinedSample, RunRecord, StepObservation, StepPlan
from dflop.records.speedup import NOT_COMPARED, Speedup
from dflop.report.comparison import Comparison, compare_policies, verdict
from dflop.report.observed_steps import MeasuredStep, measured_steps

LOSS_WINDOW = 3
"""Steps averaged for the first and the last loss: single steps are different samples, not progress."""


@dataclass(frozen=True, slots=True)
class StageStats:
    """Training steps of one pipeline stage, its data- and tensor-parallel ranks together."""

    module: str
    stage: int
    num_ranks: int
    busy_frac: float
    """Wall time in forward and backward: where processes share cores, waiting for one counts as busy."""
    reduce_frac: float
    """Gradient reduction, with the wait for slower ranks, and optimizer."""
    idle_frac: float
    """1 - busy."""
    median_error_frac: float
    """Median |predicted - measured| / measured compute seconds per microbatch; NaN without predictions."""
    predicted_to_measured: float
    """Total predicted over total measured seconds: the bias, where the median error is the scatter."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A finished (or interrupted) run."""

    run: RunRecord
    plan: Plan
    candidates: tuple[Plan, ...]
    """By rank, the plan that ran first."""
    num_cores: int | None
    """Cores the processes share; None when each has a device of its own."""
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


def summarise(
    *,
    run: RunRecord,
    cluster: ClusterSpec,
    plan: Plan,
    candidates: Sequence[Plan] = (),
    train: Sequence[StepObservation],
    compare: Sequence[StepObservation] = (),
    compare_plans: Sequence[StepPlan] = (),
    speedups: tuple[Speedup, Speedup] = (NOT_COMPARED, NOT_COMPARED),
    quarantined: Sequence[QuarantinedSample] = (),
    corrections: Sequence[Correction] = (),
) -> RunSummary:
    """Summary of one run from its records; every part but `run`, `cluster` and `plan` may be empty.

    Args:
        run: Its latest state.
        cluster: Where it ran; tells whether processes share cores.
        plan: The plan that ran.
        candidates: All plans of the run, for the record.
        train: Observations of the training job, all ranks and attempts.
        compare: Observations of the comparison job (`<run_id>/compare`), warm-up included.
        compare_plans: Step plans of the comparison job.
        speedups: Measured and simulated, of the view `v_speedup`.
        quarantined: Samples left out, by profile or training.
        corrections: Of the run, in any order.
    """
    steps = measured_steps(train)
    comparison = compare_policies(measured_steps(compare), compare_plans, *speedups)
    num_cores = cluster.max_concurrency if cluster.device == "cpu" else None
    sets = _correction_sets(corrections)
    latest = {rows[0].module: rows for rows in sets}
    losses = [s.loss for s in steps if s.loss is not None]
    num_lost, warning = _lost(quarantined)
    lost = f" Training lost {num_lost} sample(s) that the data profile called good." if num_lost else ""
    return RunSummary(
        run=run,
        plan=plan,
        candidates=tuple(sorted(candidates, key=lambda p: p.candidate_rank)) or (plan,),
        num_cores=num_cores,
        steps=steps,
        first_loss=_mean(losses[:LOSS_WINDOW]),
        last_loss=_mean(losses[-LOSS_WINDOW:]),
        step_s=_median([s.step_s for s in steps]),
        data_wait_s=_median([s.data_wait_s for s in steps]),
        idle_frac=_mean([s.idle_frac for s in steps]),
        llm_tokens_per_s=_median([s.llm_tokens_per_s for s in steps]),
        stages=_stages(steps, plan),
        comparison=comparison,
        verdict=verdict(comparison, num_processes=plan.num_processes, num_cores=num_cores) + lost,
        quarantined=tuple(sorted(quarantined, key=lambda q: (q.sample_index, q.phase, q.path))),
        warning=warning,
        corrections=tuple(c for rows in sets if rows is latest[rows[0].module] for c in rows),
        num_corrections=len(sets),
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


def _stages(steps: Sequence[MeasuredStep], plan: Plan) -> tuple[StageStats, ...]:
    seen: dict[tuple[str, int], list[StepObservation]] = {}
    for step in steps:
        for r in step.ranks:
            seen.setdefault((r.module, r.stage), []).append(r)
    # Modules of an inline plan share their first rank: the sort keeps the order of the chain.
    place = {m.module: i for i, m in enumerate(sorted(plan.modules, key=lambda m: m.first_rank))}
    return tuple(_stage(*key, seen[key]) for key in sorted(seen, key=lambda k: (place.get(k[0], math.inf), k)))


def _stage(module: str, stage: int, ranks: Sequence[StepObservation]) -> StageStats:
    total_s = sum(r.step_s for r in ranks)
    busy_frac = _ratio(sum(r.busy_s for r in ranks), total_s)
    timed = [
        (span.predicted_forward_s + span.predicted_backward_s, span.forward_compute_s + span.backward_compute_s)
        for r in ranks
        for span in r.spans
    ]
    # A span without prediction belongs to a step that ran without the scheduler: no error to speak of.
    timed = [(predicted, measured) for predicted, measured in timed if predicted > 0 and measured > 0]
    return StageStats(
        module=module,
        stage=stage,
        num_ranks=len({r.rank for r in ranks}),
        busy_frac=busy_frac,
        reduce_frac=_ratio(sum(r.reduce_s + r.optimizer_s for r in ranks), total_s),
        idle_frac=1.0 - busy_frac,
        median_error_frac=_median([abs(predicted - measured) / measured for predicted, measured in timed]),
        predicted_to_measured=_ratio(sum(p for p, _ in timed), sum(m for _, m in timed)),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _median(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
