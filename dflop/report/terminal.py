"""A run summary for terminals and for Prefect artifacts (Markdown)."""

from __future__ import annotations

import rich.table
from rich.console import Console
from rich.text import Text

from dflop.report.run_tables import SQL_LINE, correction_table, key_numbers, policy_table, quarantine_table, stage_table
from dflop.report.summary import RunSummary
from dflop.report.table_text import markdown_cell, markdown_table, print_table
from dflop.report.tables import Table, layout_text


def print_summary(summary: RunSummary, console: Console) -> None:
    """Prints the summary; fits 100 columns, needs no colour, ends with the line that opens the store."""
    run = summary.run
    # Plain text throughout: ids and reasons come from users and may look like console markup.
    console.print(Text(f"Run {run.run_id} ({run.state}): {layout_text(summary.plan)}", style="bold"))
    grid = rich.table.Table.grid(padding=(0, 2))
    for label, value, remark in key_numbers(summary):
        grid.add_row(Text(f"  {label}"), Text(value, style="bold"), Text(remark, style="dim"))
    console.print(grid)
    for table in _tables(summary):
        print_table(table, console)
    console.print()
    for line in filter(None, (summary.verdict, summary.warning)):
        console.print(Text(line, style="bold"))
    console.print()
    # The line is for copying: no wrapping, no highlighting.
    console.print(Text(SQL_LINE), soft_wrap=True)


def markdown_summary(summary: RunSummary) -> str:
    """The summary as Markdown, for a Prefect artifact."""
    parts = [
        f"# Run {markdown_cell(summary.run.run_id)} ({summary.run.state})",
        f"**{summary.verdict}**",
        "\n".join(f"- {label}: **{value}** ({remark})" for label, value, remark in key_numbers(summary)),
        *(markdown_table(table) for table in _tables(summary)),
    ]
    if summary.quarantined:
        parts.append(markdown_table(quarantine_table(summary.quarantined)))
    if summary.warning:
        parts.append(f"**{markdown_cell(summary.warning)}**")
    return "\n\n".join([*parts, f"```\n{SQL_LINE}\n```"]) + "\n"


def _tables(summary: RunSummary) -> list[Table]:
    policies = policy_table(summary).without("steps", "fwd+bwd measured")  # the page has them, 100 columns do not
    found = (policies, stage_table(summary), correction_table(summary))
    return [table for table in found if table.rows]
