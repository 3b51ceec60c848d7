"""What a report shows of a run beyond its summary. Every part may be empty: the page then says that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflop.records import Correction, JobRecord, RankFactor, RankMemory, RunInput, SampleShape, StepFlops, StepPlan
from dflop.report.history_table import HistoryEntry


@dataclass(frozen=True, slots=True)
class RunDetails:
    """Records and texts behind the sections of a report."""

    history: tuple[HistoryEntry, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """(name, value) of what ran: model, dataset, stages."""
    compare_plans: tuple[StepPlan, ...] = ()
    """Of the comparison."""
    shapes: Mapping[int, SampleShape] = field(default_factory=dict)
    """By sample index, of the batches that were compared."""
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
    memory_limit_bytes: int | None = None
    """Of a process."""
    num_steps_planned: int | None = None
    """Of the whole training."""
    config_text: str = ""
    """YAML with every default filled in."""

    @property
    def plan_steps(self) -> tuple[int, ...]:
        """Steps at which the run went on under another plan."""
        return tuple(e.step for e in self.history if e.kind == "plan" and e.step is not None)
