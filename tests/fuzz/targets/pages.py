"""What people see of words that strangers chose: ids, names and reasons in tables and on pages."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from rich.console import Console

from dflop.data.annotations import printable
from dflop.records import QuarantinedSample
from dflop.report.html import render_report
from dflop.report.rows import write_rows
from dflop.report.terminal import markdown_summary, print_summary
from dflop.report.trace import chrome_trace
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt
from tests.report.chrome_trace import problems_of
from tests.report.runs import realistic

_SAFE_TAGS = 2
"""Scripts of a report: what the timeline knows, and what runs."""


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def _rows(folder: Path) -> Callable[[Any], None]:
    def check(example: tuple[list[str], list[list[Any]]]) -> None:
        columns, rows = example
        given = [tuple((row + [None] * len(columns))[: len(columns)]) for row in rows]
        for form in ("table", "csv", "json"):
            path = folder / f"out.{form}"
            if attempt(write_rows, columns, given, form, path) is None:
                continue
            text = path.read_text(encoding="utf-8")
            if form == "csv" and columns:
                assert len(list(csv.reader(io.StringIO(text, newline="")))) == 1 + len(given)
            if form == "json":
                assert sum(isinstance(json.loads(line), dict) for line in text.splitlines() if line) == len(given)

    return check


def _tables() -> st.SearchStrategy[Any]:
    texts = hostile.TEXTS.map(printable)
    values = (
        hostile.SCALARS.map(lambda v: printable(v) if isinstance(v, str) else v)
        | st.lists(texts, max_size=2)
        | st.binary(max_size=4)
    )
    return st.tuples(
        st.lists(texts, min_size=1, max_size=3, unique=True), st.lists(st.lists(values, max_size=3), max_size=4)
    )


def _report(folder: Path) -> Callable[[Any], None]:
    summary = realistic()

    def check(words: list[str]) -> None:
        first, second, third = words
        bad = QuarantinedSample("data", 1, first, "profile", second, third)
        plan = replace(summary.plan, reason=second)
        found = replace(summary, plan=plan, quarantined=(bad,), run=replace(summary.run, name=first, code_rev=third))
        tags = _Tags(render_report(found))
        assert tags.scripts == _SAFE_TAGS, "a word became a script"
        assert not tags.handlers, "a word became an attribute"
        print_summary(found, Console(file=io.StringIO(), width=100))
        markdown_summary(found)
        problems = problems_of(json.loads(json.dumps(chrome_trace(first, []))))
        assert problems == []

    return check


TARGETS = (
    Target("tables", "columns and values of any type as table, CSV and JSON", _tables, _rows),
    Target(
        "report",
        "names and reasons with markup in the report, the terminal and Markdown",
        lambda: st.lists(hostile.TEXTS.map(printable), min_size=3, max_size=3),
        _report,
        quick=1,
    ),
)
