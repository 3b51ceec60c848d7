"""Rows of a query for people and for programs: a table, CSV or JSON lines on stdout."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_UPRIGHT_ROWS = 8


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], output: str) -> None:
    """Print rows to stdout.

    Args:
        columns: Names.
        rows: Values.
        output: `table` (for people: numbers shortened; few rows too wide for the terminal stand upright),
            `csv`, or `json` (an object per line, numbers in full).
    """
    if output == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows(rows)
    elif output == "json":
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True)), default=str))
    else:
        _print_table(columns, rows, Console())


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], console: Console) -> None:
    cells = [[_cell(v) for v in row] for row in rows]
    widths = [max([len(c), *(len(row[i]) for row in cells)]) + 2 for i, c in enumerate(columns)]
    if sum(widths) > console.width and 0 < len(rows) <= MAX_UPRIGHT_ROWS:
        longest = max(map(len, columns))
        for number, row in enumerate(cells):
            if number:
                console.print()
            for name, value in zip(columns, row, strict=True):
                console.print(Text(f"{name:<{longest}}  {value}"), soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(Text(name))
    for row in cells:
        table.add_row(*(Text(c) for c in row))
    console.print(table)
    console.print(Text(f"{len(rows)} row{'' if len(rows) == 1 else 's'}", style="dim"))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.6g}"
    return str(value)
