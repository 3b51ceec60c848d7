"""The screen: command lines that nobody would type, and what people see of words that strangers chose."""

import contextlib
import csv
import functools
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from rich.console import Console

from dflop import cli
from dflop.data.annotations import printable
from dflop.records import QuarantinedSample
from dflop.report.chrome_trace import chrome_trace
from dflop.report.rows import print_rows
from dflop.report.run_page import render_report
from dflop.report.terminal import markdown_summary, print_summary
from dflop.store import console
from tests.fuzz import hostile
from tests.fuzz.target import EXIT_CODES, Strategy, Target, attempt
from tests.jobs.configs import write_config
from tests.jobs.finished import finished_run
from tests.report.chrome_trace import problems_of
from tests.report.detailed import detailed
from tests.report.test_run_page import Page
from tests.test_cli import command_of, subcommands

_LEFT_OUT = {
    "run", "train", "serve", "reap", "doctor", "compare", "completion", "demo-data", "profile", "watch", "replan",
    "init",
}  # fmt: skip
"""Commands that start jobs or servers, end processes, or never end; `init` and `compare` take long."""
_WORDS = (
    "run.yaml", "small-1", "latest", "store", "runs", "out.json", "out.svg", "nope.yaml", "missing/out.svg", "tables",
    "select 1", "--set=train.num_steps=", "train.num_steps=1e999", "--json", "--format", "--store", "--param", "a=b",
    "=", "--gpus=99999999999999999999", "--steps=9..1", "--timeout-s=inf", "--device=h100", "--emit=json", "-n",
)  # fmt: skip


@functools.cache
def _options(chain: tuple[str, ...]) -> list[str]:
    if (command := command_of(cli.app, chain)) is None:
        return []
    names = [name for argument in command.assemble_argument_collection() for name in argument.names]
    return sorted({name for name in names if name.startswith("-")})


def _argv(chain: tuple[str, ...]) -> Strategy:
    """A command with any words and its own options."""
    word = st.sampled_from(_WORDS) | hostile.TEXTS | hostile.SCALARS.map(lambda v: str(v)[:400])
    option = st.sampled_from(_options(chain) or ["--help"])
    pair = st.tuples(option, word).map(lambda p: [f"{p[0]}={p[1]}"] if p[0].startswith("--") else list(p))
    parts = st.lists(word.map(lambda w: [w]) | pair, max_size=5)
    return parts.map(lambda found: [*chain, *(word for part in found for word in part)])


def _finished(folder: Path) -> Path:
    finished_run(folder)
    write_config(folder)
    return folder


def _command(folder: Path, argv: list[str]) -> None:
    """In this process, as `dflop` runs it."""
    code, err = 0, io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["dflop", *argv]),
        mock.patch.object(console, "bound_process"),  # bounds are a process's own
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as error:
            code = error.code or 0
    assert code in EXIT_CODES, f"exit code {code}: {err.getvalue()[:300]}"
    assert "Traceback" not in err.getvalue()
    assert code != 2 or err.getvalue().strip(), "refused without a word"


def _table(folder: Path, example: tuple[list[str], list[list[Any]]]) -> None:
    columns, rows = example
    given = [tuple((row + [None] * len(columns))[: len(columns)]) for row in rows]
    for form in ("table", "csv", "json"):
        path = folder / f"out.{form}"
        if attempt(print_rows, columns, given, form, path) is None:
            continue
        text = path.read_text(encoding="utf-8")
        if form == "csv" and columns:
            assert len(list(csv.reader(io.StringIO(text, newline="")))) == 1 + len(given)
        if form == "json":
            assert sum(isinstance(json.loads(line), dict) for line in text.splitlines() if line) == len(given)


_summary = functools.cache(detailed)


def _report(_folder: Path, words: tuple[str, str, str]) -> None:
    summary, (first, second, third) = _summary(), words
    bad = QuarantinedSample("data", 1, first, "profile", second, third)
    plan, run = replace(summary.plan, reason=second), replace(summary.run, name=first, code_rev=third)
    found = replace(summary, plan=plan, quarantined=(bad,), run=run)
    page = Page(render_report(found))
    assert "script" not in page.tags, "a word became a script"
    assert not page.handlers, "a word became an attribute"
    print_summary(found, Console(file=io.StringIO(), width=100))
    markdown_summary(found)
    assert problems_of(json.loads(json.dumps(chrome_trace(first, [])))) == []


_READING = st.deferred(lambda: st.sampled_from([c for c in subcommands(cli.app) if not set(c) & _LEFT_OUT]))
_PRINTABLE = hostile.TEXTS.map(printable)
_CELLS = st.one_of(hostile.SCALARS.map(lambda v: printable(v) if isinstance(v, str) else v),
                   st.lists(_PRINTABLE, max_size=2), st.binary(max_size=4))  # fmt: skip
_COLUMNS = st.lists(_PRINTABLE, min_size=1, max_size=3, unique=True)
_TABLES = st.tuples(_COLUMNS, st.lists(st.lists(_CELLS, max_size=3), max_size=4))
TARGETS = (
    Target("command-line", "words after the commands that only read", _READING.flatmap(_argv), _command, _finished,
           quick=6, deadline_s=60),
    Target("tables", "columns and values of any type as table, CSV and JSON", _TABLES, _table),
    Target("report", "names and reasons with markup in the report, the terminal and Markdown",
           st.tuples(_PRINTABLE, _PRINTABLE, _PRINTABLE), _report, quick=1),
)  # fmt: skip
