"""Everything a person wants to know about a run: gathered and computed once, shown on a terminal, in Prefect, in HTML.

A further figure of a run is a property here and a line of `key_numbers` in `run_tables.py`, which all three show.
Measured and simulated numbers never mix in one of them. Sums and means follow the views `v_stage_idle` and `v_step`,
so that a number here can be found again with SQL.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dflop.cost.terms import Term
from dflop.models.generic.exactness import KeptCheck
from dflop.records import (
    BUSY_RATIO,
    ROUTERS,
    ClusterSpec,
    Correction,
    JobRecord,
    Plan,
    QuarantinedSample,
    RankFactor,
    RankMemory,
    RunInput,
    RunRecord,
    SourceLoss,
    StepFlops,
    StepObservation,
    StepPlan,
)
from dflop.report.comparison import Comparison, Speedups, compare_policies, verdict
from dflop.report.history_table import HistoryEntry
from dflop.report.observed_steps import MeasuredStep, measured_steps
from dflop.report.stage_stats import StageStats, stage_stats

LOSS_WINDOW = 3
"""Steps averaged for the first and the last loss: single steps are different samples, not progress."""


@dataclass(frozen=True)
class RunSummary:
    """A finished (or interrupted) run: its rows, in any order, and what they say. Every part but three may be empty."""

    run: RunRecord
    """Latest state of the run."""
    cluster: ClusterSpec
    plan: Plan
    """The plan that ran."""
    candidates: Sequence[Plan] = ()
    """All that the search found, by rank, the plan that ran first."""
    train: Sequence[StepObservation] = ()
    """Observations of the training job, all ranks and attempts."""
    compare: Sequence[StepObservation] = ()
    """Observations of the comparison job (`<run_id>/compare`), warm-up included."""
    compare_plans: Sequence[StepPlan] = ()
    speedups: Speedups = field(default_factory=dict)
    """Rows of the view `v_speedup`."""
    quarantined: Sequence[QuarantinedSample] = ()
    """Samples left out, by profile or training."""
    correction_rows: Sequence[Correction] = ()
    """All sets."""
    rank_factors: Sequence[RankFactor] = ()
    peaks: Sequence[RankMemory] = ()
    """Peaks of memory in training."""
    flops: Sequence[StepFlops] = ()
    """FLOPs of training steps."""
    losses: Sequence[SourceLoss] = ()
    jobs: Sequence[JobRecord] = ()
    inputs: Sequence[RunInput] = ()
    history: Sequence[HistoryEntry] = ()
    """In order."""
    facts: Sequence[tuple[str, str]] = ()
    """(name, value) of what ran: model, dataset, stages."""
    cost_sources: Sequence[tuple[str, str]] = ()
    """(module with its degree, `measured`, `derived` or `analytic`)."""
    terms: Sequence[Term] = ()
    """Costs that the plan was made from."""
    model_check: tuple[KeptCheck | None, str] = (None, "No check of the model is recorded.")
    """(newest check of the model's stages, what the page says without one)."""
    num_steps_planned: int | None = None
    """Steps of the whole training."""
    epoch_steps: float = math.nan
    """Steps that take as many samples as the data profile has; NaN: not known."""
    usd_per_gpu_hour: float = 0.0
    """0: not known."""
    config_text: str = ""
    """YAML with every default filled in."""

    @property
    def num_cores(self) -> int | None:
        """Cores the processes share; None when each has its device."""
        return self.cluster.max_concurrency if self.cluster.device == "cpu" else None

    @property
    def shares_cores(self) -> bool:
        """Whether some processes wait for a core."""
        return self.num_cores is not None and self.num_cores < self.plan.num_processes

    @cached_property
    def steps(self) -> tuple[MeasuredStep, ...]:
        """Steps of training."""
        return measured_steps(self.train)

    def median(self, of: Callable[[MeasuredStep], float]) -> float:
        """Over the steps of training that have it; NaN without any."""
        return _median([of(step) for step in self.steps])

    @property
    def ends_of_loss(self) -> tuple[float, float] | None:
        """Means over the first and the last steps that have a loss; NaN where one diverged, None without any."""
        found = [s.loss for s in self.steps if s.loss is not None]
        return (statistics.fmean(found[:LOSS_WINDOW]), statistics.fmean(found[-LOSS_WINDOW:])) if found else None

    @cached_property
    def validation(self) -> dict[int, float]:
        """Loss of the samples held out of training, by the step after which it was measured; of the last attempt."""
        return self._losses_of("validation")

    @cached_property
    def router_loss(self) -> dict[int, float]:
        """Load balancing loss of layers with experts, by step; of the last attempt."""
        return self._losses_of(ROUTERS)

    def _losses_of(self, split: str) -> dict[int, float]:
        found: dict[int, dict[str, SourceLoss]] = {}
        for row in sorted((r for r in self.losses if r.split == split), key=lambda r: (r.step, r.attempt)):
            found.setdefault(row.step, {})[row.source] = row
        return {
            step: sum(r.loss * r.num_tokens for r in rows.values()) / sum(r.num_tokens for r in rows.values())
            for step, rows in found.items()
        }

    @property
    def idle_frac(self) -> float:
        """Mean, measured."""
        return statistics.fmean(s.idle_frac for s in self.steps) if self.steps else math.nan

    @property
    def step_s(self) -> float:
        """Median, measured."""
        return self.median(lambda step: step.step_s)

    @property
    def wall_to_compute(self) -> float:
        """Wall over processor time of forward and backward in training, where each process has a core; else NaN."""
        if self.num_cores is None or not self.plan.has_own_cores(self.num_cores):
            return math.nan
        wall_s = sum(rank.busy_s for step in self.steps for rank in step.ranks)
        compute_s = sum(rank.compute_s for step in self.steps for rank in step.ranks)
        return wall_s / compute_s if compute_s > 0 else math.nan

    @property
    def predicted_to_measured(self) -> float:
        """Predicted over measured seconds of steps, median over those with a prediction, as `v_step` has them."""
        return _median([s.predicted_step_s / s.step_s for s in self.steps if s.predicted_step_s > 0 < s.step_s])

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, median over steps; NaN where the peak of the devices is not known."""
        step_s = {s.step: s.step_s for s in self.steps}
        known = [f for f in self.flops if step_s.get(f.step, 0.0) > 0 and f.peak_flops_per_s > 0]
        return _median([f.model_flops / (f.peak_flops_per_s * step_s[f.step]) for f in known])

    @cached_property
    def stages(self) -> tuple[StageStats, ...]:
        """Stages of training."""
        return stage_stats(self.steps, self.plan)

    @cached_property
    def comparison(self) -> Comparison | None:
        """None where no policy has a step."""
        return compare_policies(measured_steps(self.compare), self.compare_plans, self.speedups)

    @property
    def plan_steps(self) -> tuple[int, ...]:
        """Steps at which the run went on under another plan."""
        return tuple(e.step for e in self.history if e.kind == "plan" and e.step is not None)

    @cached_property
    def correction_sets(self) -> list[list[Correction]]:
        """Rows that were written together, in the order of their steps, within each by size."""
        found: dict[tuple[int, str, float, str], list[Correction]] = {}
        for c in sorted(
            self.correction_rows, key=lambda c: (c.effective_step, c.observed_at_s, c.module, c.min_tokens)
        ):
            found.setdefault((c.effective_step, c.module, c.observed_at_s, c.table_id), []).append(c)
        return list(found.values())

    @property
    def corrections(self) -> list[list[Correction]]:
        """The last set of each module."""
        latest = {rows[0].module: rows for rows in self.correction_sets}
        return [rows for rows in self.correction_sets if rows is latest[rows[0].module]]

    @property
    def verdict(self) -> str:
        """Who won, in plain sentences."""
        found = verdict(self.comparison, num_processes=self.plan.num_processes, num_cores=self.num_cores)
        if self.wall_to_compute > BUSY_RATIO:
            found += (
                f" Other programs used the cores: forward and backward took {self.wall_to_compute:.2f} times their "
                f"processor time in training, steps {1 / self.predicted_to_measured:.2f} times their prediction."
            )
        if not self._lost:
            return found
        return f"{found} Training skipped {len(self._lost)} sample(s) that the data profile had accepted."

    @property
    def warning(self) -> str:
        """Warning of samples that the profile accepted and training could not use; empty where there are none."""
        if not self._lost:
            return ""
        first = self._lost[0]
        return (
            f"Warning: {len(self._lost)} sample(s) that the data profile had accepted were not trained on, first "
            f"`{first.sample_id}` ({first.path or 'no path'}): {first.reason}. All: select * from v_quarantine"
        )

    @property
    def _lost(self) -> list[QuarantinedSample]:
        """The first row of each such sample."""
        found = sorted((q for q in self.quarantined if q.phase == "train"), key=lambda q: (q.sample_index, q.path))
        return [q for i, q in enumerate(found) if i == 0 or q.sample_index != found[i - 1].sample_index]


def _median(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan
