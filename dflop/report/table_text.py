"""A table of text cells on a terminal, and as Markdown that no cell can leave."""

from __future__ import annotations

from typing import Literal

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from dflop.errors import printable
from dflop.report.tables import Table


def print_table(table: Table, console: Console) -> None:
    """Prints title, rows and note; cells are plain text, whatever looks like markup in them."""
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(table.header):
        # Room is taken from what can be wrapped between words.
        is_single_words = not any(" " in text for text in (name, *(row[i] for row in table.rows)))
        justify: Literal["left", "right"] = "left" if name in table.text_columns else "right"
        shown.add_column(Text(name), justify=justify, no_wrap=is_single_words)
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console.print()
    console.print(Text(table.title, style="bold"))
    console.print(shown)
    if table.note:
        console.print(Text(table.note, style="dim"))


def markdown_table(table: Table) -> str:
    """Title, rows and note as Markdown, without a line's end: for artifacts of Prefect."""
    rule = (":--" if name in table.text_columns else "--:" for name in table.header)
    lines = [table.header, tuple(rule), *(tuple(markdown_cell(c) for c in row) for row in table.rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {table.title}\n\n{body}" + (f"\n\n{table.note}" if table.note else "")


def markdown_cell(text: str) -> str:
    """Text that cannot leave its cell: no new row, no new column, no HTML, no link."""
    flat = " ".join(printable(text).split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for mark in "|[]`*_":
        flat = flat.replace(mark, f"\\{mark}")
    return flat
