"""One HTML file about a simulated comparison: speed-ups with their bounds, in the look of a run's report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dflop.report.calculator import SCRIPT as CALCULATOR
from dflop.report.calculator import Calculator
from dflop.report.html_page import render_page
from dflop.report.tables import Table


@dataclass(frozen=True, slots=True)
class Drawing:
    """An inline `<svg>` and what it shows."""

    svg: str
    caption: str
    is_wide: bool = False
    """Whether it scrolls in a box of its own where there is no room, since its text would become too small."""


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """What the page shows, from top to bottom."""

    title: str
    subtitle: str
    verdict: str
    numbers: tuple[tuple[str, str, str], ...]
    """(label, value, remark)."""
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    """(name, value) of what is needed to get the same numbers again."""
    calculator: Calculator | None = None


def render_comparison(page: ComparisonPage) -> str:
    """The whole document, a pure function of its content."""
    scripts = (CALCULATOR, "print.js") if page.calculator else ("print.js",)
    return render_page("comparison.html.jinja", scripts, page=page)


def split_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    wanted: Collection[str],
    keys: Collection[str],
    note: str = "",
) -> Table:
    """Some columns of a table too wide for a page.

    Args:
        title: Of the table.
        columns: Of the whole one.
        rows: Likewise.
        wanted: Columns to take, in the order of `columns`.
        keys: Columns that say what a row is about: taken, too, and aligned as text.
        note: Below the table.
    """
    chosen = [i for i, name in enumerate(columns) if name in wanted or name in keys]
    return Table(
        title,
        tuple(columns[i] for i in chosen),
        tuple(tuple(row[i] for i in chosen) for row in rows),
        frozenset(keys) & frozenset(columns),
        note,
    )
