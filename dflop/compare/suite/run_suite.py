"""Runs a suite by name: a table for people, all numbers for programs, pictures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from dflop import __version__
from dflop.compare.suite import paper, sweeps
from dflop.compare.suite.contest import Contest
from dflop.errors import ConfigError, did_you_mean
from dflop.profile.hardware import hardware_name
from dflop.records import CostTable
from dflop.report.html_page import Drawing
from dflop.report.plots import check_suffix
from dflop.run.messages import Say


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a suite found; every number is simulated."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...]
    contests: tuple[Contest, ...]
    numbers: list[dict[str, object]]
    draw: Callable[[Path], None]
    drawings: Callable[[], list[Drawing]]
    """For a page."""


def run_suite(name: str, say: Say, pictures: Sequence[Path] = (), json_file: Path | None = None) -> SuiteResult:
    """Runs a suite and writes what was asked for.

    Args:
        name: One of `SUITES`.
        say: Told what happens.
        pictures: .png, .svg or .pdf files to draw into.
        json_file: Gets all numbers, with machine, versions and cost tables.

    Raises:
        ConfigError: unknown suite, or a picture that cannot be drawn.
        InfeasiblePlanError: a case of the paper's on which no plan fits.
        OSError: a file cannot be written.
    """
    if name not in SUITES:
        raise ConfigError(f"unknown suite `{name}`", hint=did_you_mean(name, SUITES))
    for picture in pictures:
        check_suffix(picture)
    started_s = time.process_time()
    found = SUITES[name](say)
    for picture in pictures:
        found.draw(picture)
    if json_file:
        content = {**provenance(found), "cpu_s": time.process_time() - started_s, "cases": found.numbers}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    return found


def provenance(found: SuiteResult) -> dict[str, object]:
    """Machine, versions and costs behind the numbers."""
    return {
        "suite": found.name,
        "simulated": True,
        "notes": found.notes,
        "costs": sorted({c.setting.cost_name for c in found.contests}),
        "cost_tables": _tables(found.contests),
        "machine": {"cpu": hardware_name("cpu"), "num_cores": os.cpu_count()},
        "versions": {"dflop": __version__, **{name: version(name) for name in ("numpy", "numba", "cvxpy")}},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _tables(contests: Sequence[Contest]) -> dict[str, dict[str, str]]:
    """Per model, the cost tables at hand: `module tp 2 recompute` -> table id."""
    return {
        c.setting.name: {_table_name(table): table.table_id for table in c.setting.problem.cost.tables}
        for c in contests
    }


def _table_name(table: CostTable) -> str:
    return f"{table.module} tp {table.tp}{' recompute' if table.recompute else ''}, {table.hardware}, {table.source}"


def _paper(say: Say) -> SuiteResult:
    contests = paper.run_paper(say)
    return SuiteResult(
        "paper",
        paper.COLUMNS,
        paper.paper_rows(contests),
        (*paper.NOTES, f"costs: {contests[0].setting.cost_name}"),
        tuple(contests),
        paper.contest_numbers(contests),
        lambda path: paper.save_paper_plot(contests, path),
        lambda: paper.paper_drawings(contests),
    )


def _sweep(name: str, points: Sequence[sweeps.Point]) -> SuiteResult:
    return SuiteResult(
        name,
        sweeps.COLUMNS,
        sweeps.sweep_rows(points),
        (*paper.NOTES[:2], f"costs: {points[0].found.setting.cost_name}"),
        tuple(point.found for point in points),
        sweeps.sweep_numbers(points),
        lambda path: sweeps.save_sweep_plot(points, path),
        lambda: sweeps.sweep_drawings(points),
    )


SUITES: Mapping[str, Callable[[Say], SuiteResult]] = {
    "paper": _paper,
    "scaling": lambda say: _sweep("scaling", sweeps.run_scaling(say)),
    "balance": lambda say: _sweep("balance", sweeps.run_balance(say)),
    "noise": lambda say: _sweep("noise", sweeps.run_noise(say)),
}
