"""Rows of a query for people and for programs: a table, CSV or JSON lines, on stdout or in a file."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflop import files
from dflop.errors import ConfigError, printable

Row = Sequence[Any]

MAX_UPRIGHT_ROWS = 8
MIN_TEXT_WIDTH = 30
MAX_TABLE_ROWS = 10_000
"""A table is laid out as a whole; what is longer is for a program, or for a LIMIT."""


def print_rows(columns: Sequence[str], rows: Iterable[Row], form: str, output: Path | None = None) -> int:
    """Prints or writes rows as they come; a file appears under its name only when it is complete.

    Args:
        columns: Names.
        rows: Values.
        form: `table` (for people: numbers shortened; few rows too wide for the terminal stand upright), `csv`, or
            `json` (an object per line, numbers in full).
        output: File, or None for stdout.

    Returns:
        Number of rows written.

    Raises:
        ConfigError: Two columns have one name, and the form is `json`, where one would be lost.
        OSError: The file cannot be written.
    """
    if form == "json" and len(set(columns)) < len(columns):
        twice = sorted({name for name in columns if list(columns).count(name) > 1})
        raise ConfigError(f"duplicate column names: {', '.join(twice)}", hint="rename them: select a as x, b as y")
    with _target(output) as file:
        if form == "table":
            return _write_table(columns, rows, file)
        return _write_text(columns, rows, form, file)


@contextmanager
def _target(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    with files.written(output) as place, open(place, "w", encoding="utf-8", newline="") as file:
        yield file  # the CSV writer ends its own lines


def _write_text(columns: Sequence[str], given: Iterable[Row], form: str, file: IO[str]) -> int:
    num_rows, writer = 0, csv.writer(file)
    if form == "csv":
        writer.writerow(columns)
    for row in given:
        num_rows += 1
        if form == "csv":
            writer.writerow([json_text(v) if isinstance(v, dict | list) else v for v in row])
        else:
            file.write(json_text(dict(zip(columns, row, strict=True))) + "\n")
    return num_rows


def _write_table(columns: Sequence[str], given: Iterable[Row], file: IO[str]) -> int:
    left = iter(given)
    rows = list(islice(left, MAX_TABLE_ROWS))
    num_more = sum(1 for _ in left)
    console = Console(file=file) if file is not sys.stdout else Console()
    _print_table(columns, rows, console)
    if num_more:
        console.print(Text(f"and {num_more} more rows: use --format csv, json or parquet"))
    return len(rows) + num_more


def _print_table(columns: Sequence[str], rows: Sequence[Row], console: Console) -> None:
    cells = [[_cell(v) for v in row] for row in rows]
    widths = [max([len(c), *(len(row[i]) for row in cells)]) + 3 for i, c in enumerate(columns)]
    if sum(widths) > console.width and 0 < len(rows) <= MAX_UPRIGHT_ROWS:
        longest = max(map(len, columns))
        for number, row in enumerate(cells):
            if number:
                console.print()
            for name, value in zip(columns, row, strict=True):
                console.print(Text(f"{name:<{longest}}  {value}"), soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD)
    needed = [min(width, max(MIN_TEXT_WIDTH, len(name) + 3)) for name, width in zip(columns, widths, strict=True)]
    if sum(needed) > console.width and not console.is_terminal:
        console.width = sum(needed) + 1  # a log or a pager has no edge: nothing to cut names for
    for number, (name, width) in enumerate(zip(columns, widths, strict=True)):
        # Numbers, times and ids stay whole where there is room, the first column always; sentences wrap.
        whole = width <= MIN_TEXT_WIDTH and sum(needed) < console.width
        table.add_column(Text(name), overflow="fold", no_wrap=whole or number == 0)
    for row in cells:
        table.add_row(*(Text(c) for c in row))
    console.print(table)
    console.print(Text(f"{len(rows)} row{'' if len(rows) == 1 else 's'}", style="dim"))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
    return json_text(value) if isinstance(value, dict | list) else printable(str(value))


def json_text(value: Any) -> str:
    """One line of JSON: what is no finite number is null, numbers are in full."""
    return json.dumps(_clean(value), default=str, allow_nan=False)


def _clean(value: Any) -> Any:
    """JSON knows no NaN, infinity or bytes: null and hexadecimal digits are what every reader understands."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): _clean(v) for name, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list | tuple) else value
