"""A run summary for terminals and for Prefect artifacts (Markdown)."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from dflop.errors import printable
from dflop.records import Plan
from dflop.report import tables
from dflop.report.summary import RunSummary
from dflop.report.tables import Table


def print_summary(summary: RunSummary, console: Console) -> None:
    """Prints the summary; fits 100 columns, needs no colour, ends with the line that opens the store."""
    run = summary.run
    # Plain text throughout: ids and reasons come from users and may look like console markup.
    console.print(Text(f"Run {run.run_id} ({run.state}): {tables.layout_text(summary.plan)}", style="bold"))
    console.print(_pairs(tables.key_numbers(summary)))
    for table in (tables.policy_table(summary), tables.stage_table(summary), tables.correction_table(summary)):
        if table.rows:
            print_table(table, console)
    console.print()
    console.print(Text(summary.verdict, style="bold"))
    if summary.warning:
        console.print(Text(summary.warning, style="bold"))
    console.print()
    # The line is for copying: no wrapping, no highlighting.
    console.print(Text(tables.SQL_LINE), soft_wrap=True)


def markdown_summary(summary: RunSummary) -> str:
    """The summary as Markdown, for a Prefect artifact."""
    parts = [
        f"# Run {_cell(summary.run.run_id)} ({summary.run.state})",
        f"**{summary.verdict}**",
        "\n".join(f"- {label}: **{value}** ({remark})" for label, value, remark in tables.key_numbers(summary)),
    ]
    shown = (
        tables.policy_table(summary),
        tables.stage_table(summary),
        tables.correction_table(summary),
        tables.quarantine_table(summary),
    )
    parts += [markdown_table(table) for table in shown if table.rows]
    if summary.warning:
        parts.append(f"**{_cell(summary.warning)}**")
    return "\n\n".join([*parts, f"```\n{tables.SQL_LINE}\n```"]) + "\n"


def markdown_plan(plans: Sequence[Plan]) -> str:
    """The candidates of a plan as a Markdown table, for a Prefect artifact."""
    return markdown_table(tables.plan_table(plans)) + "\n"


def _pairs(numbers: Sequence[tuple[str, str, str]]) -> rich.table.Table:
    grid = rich.table.Table.grid(padding=(0, 2))
    for label, value, remark in numbers:
        grid.add_row(Text(f"  {label}"), Text(value, style="bold"), Text(remark, style="dim"))
    return grid


def print_table(table: Table, console: Console) -> None:
    """Prints title, rows and note."""
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in table.header:
        shown.add_column(Text(name), justify="left" if name in table.text_columns else "right")
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console.print()
    console.print(Text(table.title, style="bold"))
    console.print(shown)
    if table.note:
        console.print(Text(table.note, style="dim"))


def markdown_table(table: Table) -> str:
    """Title, rows and note as Markdown; no cell can be left by what stands in it."""
    rule = (":--" if name in table.text_columns else "--:" for name in table.header)
    lines = [table.header, tuple(rule), *(tuple(_cell(c) for c in row) for row in table.rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {table.title}\n\n{body}" + (f"\n\n{table.note}" if table.note else "")


def _cell(text: str) -> str:
    """Text that cannot leave its cell: no new row, no new column, no HTML, no link."""
    flat = " ".join(printable(text).split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for mark in "|[]`*_":
        flat = flat.replace(mark, f"\\{mark}")
    return flat
