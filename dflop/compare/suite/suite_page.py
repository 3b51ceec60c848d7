"""A suite as one HTML page: what `dflop compare --suite NAME --html FILE` writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from dflop.compare.suite import paper
from dflop.compare.suite.contest import OURS, Contest, by_mixture
from dflop.compare.suite.run_suite import SuiteResult, provenance
from dflop.compare.suite.unseen_batches import geometric_mean
from dflop.report.html_page import Page, Section
from dflop.report.tables import Table
from dflop.units import ratio

KEYS = frozenset({"model", "data", "sweep", "at"})
"""Columns that say what a row is about."""
SPEEDUPS = frozenset({
    "default", "length-grouped", "reference", "token LPT", "tuned + our batches", "dflop", "95 %", "bound",
})  # fmt: skip
TITLES = {
    "paper": "dflop on the models of the paper",
    "scaling": "dflop on clusters of every size",
    "balance": "dflop and the weight of the encoder",
    "noise": "dflop where costs stray from their predictions",
}


def suite_page(found: SuiteResult) -> Page:
    """The page of a suite's result."""
    rest = frozenset(found.columns) - KEYS - SPEEDUPS
    tables = [
        _some_columns("Speed-ups over the tuned uniform plan", found, SPEEDUPS),
        _some_columns("Step times, idle time and what the bound leaves", found, rest),
    ]
    if found.name == "paper":
        tables.append(_plans(found.contests))
    return Page(
        title=TITLES.get(found.name, f"dflop, suite {found.name}"),
        subtitle=f"Suite {found.name}: {len(found.contests)} settings, costs of data sheets, never measured.",
        kinds=("simulated",),
        verdict=verdict(found.contests),
        numbers=tuple(_numbers(found.contests)),
        sections=(
            Section(
                "speedups",
                "Speed-ups and their bounds",
                ("simulated",),
                drawings=tuple(found.drawings()),
                tables=tuple(tables),
            ),
            Section("how", "How to read this", notes=found.notes),
            Section("reproduce", "To reproduce", facts=tuple(_facts(found))),
        ),
    )


def verdict(contests: Sequence[Contest]) -> str:
    """Who won by how much, per kind of data, in plain words."""
    sentences = []
    for mixture, of in by_mixture(contests):
        speedups = _speedups(of)
        mean, bound = geometric_mean(speedups), geometric_mean([c.bound_speedup for c in of])
        several = f", {ratio(min(speedups))} to {ratio(max(speedups))}" if len(speedups) > 1 else ""
        sentences.append(
            f"On data `{mixture}` dflop is {ratio(mean)} as fast as the best uniform plan{several}. "
            f"With every GPU busy all the time it would be {ratio(bound)}."
        )
    means = " Both are geometric means over the settings." if len(contests) > 1 else ""
    return " ".join(sentences) + means + " All of it is simulated."


def _numbers(contests: Sequence[Contest]) -> list[tuple[str, str, str]]:
    found = []
    for mixture, of in by_mixture(contests):
        speedups, bound = _speedups(of), geometric_mean([c.bound_speedup for c in of])
        remark = f"{len(of)} settings, bound {ratio(bound)}, geometric means"
        found.append((f"speed-up on `{mixture}`, simulated", ratio(geometric_mean(speedups)), remark))
    return found


def _speedups(contests: Sequence[Contest]) -> list[float]:
    found = [c.speedup(OURS) for c in contests]
    return [s.mean if s else math.nan for s in found]


def _some_columns(title: str, found: SuiteResult, wanted: Collection[str]) -> Table:
    """Some columns of a table too wide for a page, and those that say what a row is about."""
    chosen = [i for i, name in enumerate(found.columns) if name in wanted or name in KEYS]
    return Table(
        title,
        tuple(found.columns[i] for i in chosen),
        tuple(tuple(row[i] for i in chosen) for row in found.rows),
        KEYS & frozenset(found.columns),
    )


def _plans(contests: Sequence[Contest]) -> Table:
    return Table(
        "Plans",
        ("model", "data", "competitor", "layout", "microbatches"),
        tuple(paper.plan_rows(contests)),
        frozenset({"model", "data", "competitor", "layout"}),
    )


def _facts(found: SuiteResult) -> list[tuple[str, str]]:
    known = provenance(found)
    return [
        ("command", f"dflop compare --suite {found.name}"),
        ("costs", ", ".join(sorted({c.setting.cost_name for c in found.contests}))),
        *((name.replace("_", " "), _words(known[name])) for name in ("machine", "versions", "date")),
    ]


def _words(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
