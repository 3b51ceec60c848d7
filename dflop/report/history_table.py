"""What was noticed and decided in a run, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from dflop import units
from dflop.report.tables import Table, make_table

MAX_LINES = 200
"""Newest decisions shown of a run that decides often; all of them are in the store."""
_STATES = frozenset({"run", "job", "plan"})
"""Kinds that every run has."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One line of a run's history: a row of the view `v_history`."""

    elapsed_s: float
    """Since the run began."""
    step: int | None
    """At which it was noticed, counted from 0; None where it belongs to no step."""
    attempt: int | None
    """Start of the training job that it belongs to."""
    kind: str
    """`run`, `job`, `plan`, `correction`, the kind of an event or of a decision."""
    subject: str
    verdict: str
    gain_s: float | None
    """Expected over the steps that were left; None where none was computed."""
    cost_s: float | None
    detail: str
    """In words, with figures."""
    observed_at: datetime
    """UTC."""


COLUMNS = tuple(field.name for field in fields(HistoryEntry))


def history_table(entries: Sequence[HistoryEntry]) -> Table:
    """One row per entry, the newest `MAX_LINES` of them."""
    shown = entries[-MAX_LINES:]
    num_earlier = len(entries) - len(shown)
    notes = [
        "Time since the run began; steps count from 0." * bool(shown),
        "No events." * all(entry.kind in _STATES for entry in entries),
        f"{num_earlier} earlier lines: dflop history RUN --format json" * (num_earlier > 0),
    ]
    return make_table(
        "History",
        shown,
        {
            "time": lambda e: units.clock(e.elapsed_s),
            "step": lambda e: "" if e.step is None else str(e.step),
            "kind": lambda e: e.kind.replace("_", " "),
            "verdict": lambda e: e.verdict,
            "what happened": lambda e: e.detail if e.subject in e.detail else f"{e.subject}: {e.detail}",
        },
        text={"kind", "verdict", "what happened"},
        note=" ".join(filter(None, notes)),
        empty="No events are recorded for this run.",
        num_shown=20,
    )
