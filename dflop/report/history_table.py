"""What was noticed and decided in a run, in order: for the terminal, as Markdown, and for the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from dflop import units
from dflop.report.tables import Table
from dflop.report.terminal import markdown_table

COMMAND = "dflop history RUN --format json"
MAX_LINES = 200
"""Of a run that decides often, the newest; all of them are in the store."""
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
    """Expected over the steps that were left; None where none was reckoned."""
    cost_s: float | None
    detail: str
    """In words, with figures."""
    observed_at: datetime
    """UTC."""


COLUMNS = tuple(field.name for field in fields(HistoryEntry))


def history_rows(entries: Iterable[HistoryEntry]) -> list[tuple[Any, ...]]:
    """Values in the order of `COLUMNS`, for programs."""
    return [tuple(getattr(entry, name) for name in COLUMNS) for entry in entries]


def history_table(entries: Sequence[HistoryEntry]) -> Table:
    """One row per entry, the newest `MAX_LINES` of them."""
    shown = entries[-MAX_LINES:]
    notes = ["Time since the run began; steps count from 0."] if shown else []
    if all(entry.kind in _STATES for entry in entries):
        notes.append("Nothing was decided: nothing that would have called for it was noticed.")
    if len(shown) < len(entries):
        notes.append(f"{len(entries) - len(shown)} earlier lines: {COMMAND}")
    return Table(
        "History",
        ("time", "step", "kind", "verdict", "what happened"),
        tuple(
            (
                units.clock(entry.elapsed_s),
                "" if entry.step is None else str(entry.step),
                entry.kind.replace("_", " "),
                entry.verdict,
                _what(entry),
            )
            for entry in shown
        ),
        frozenset({"kind", "verdict", "what happened"}),
        " ".join(notes),
    )


def markdown_history(entries: Sequence[HistoryEntry]) -> str:
    """The history as a Markdown table, for a Prefect artifact."""
    return markdown_table(history_table(entries)) + "\n"


def _what(entry: HistoryEntry) -> str:
    return entry.detail if entry.subject in entry.detail else f"{entry.subject}: {entry.detail}"
