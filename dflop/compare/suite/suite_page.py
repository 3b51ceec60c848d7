"""A suite as one HTML page: what `dflop compare --suite NAME --html FILE` writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from dflop.compare.suite.contest import OURS, UNIFORM, Contest, by_mixture
from dflop.compare.suite.run_suite import COMPETITORS, SuiteResult, plan_rows, provenance
from dflop.compare.suite.suite_figures import drawings
from dflop.compare.suite.unseen_batches import geometric_mean
from dflop.report.html_page import Page, Section
from dflop.report.tables import Table
from dflop.units import ratio

KEYS = frozenset({"model", "data", "sweep", "at", "baseline"})
"""Columns that say what a row is about."""
SPEEDUPS = frozenset({*COMPETITORS, "95 %", "over experts", "bound"})
TITLES = {
    "paper": "dflop on the models of the paper",
    "scaling": "dflop on clusters of every size",
    "balance": "dflop and the size of the encoder",
    "noise": "dflop where costs deviate from their predictions",
}


def suite_page(found: SuiteResult) -> Page:
    """The page of a suite's result."""
    rest = frozenset(found.columns) - KEYS - SPEEDUPS
    tables = [
        _some_columns("Speedups over the baseline", found, SPEEDUPS),
        _some_columns("Step times, idle time and distance to the bound", found, rest),
    ]
    if found.name == "paper":
        header = ("model", "data", "competitor", "layout", "microbatches")
        tables.append(Table("Plans", header, tuple(plan_rows(found.contests)), frozenset(header[:-1])))
    verdict, numbers = _told(found.contests)
    known = provenance(found)
    facts = [
        ("command", f"dflop compare --suite {found.name}"),
        ("costs", ", ".join(sorted({c.setting.cost_name for c in found.contests}))),
        *((name, _words(known[name])) for name in ("machine", "versions", "date")),
    ]
    speedups = Section(
        "speedups", "Speedups and their bounds", ("simulated",), drawings=drawings(found.points), tables=tuple(tables)
    )
    return Page(
        title=TITLES[found.name],
        subtitle=f"Suite {found.name}: {len(found.contests)} settings, costs of data sheets.",
        kinds=("simulated",),
        verdict=verdict,
        numbers=numbers,
        sections=(
            speedups,
            Section("how", "How to read this", notes=found.notes),
            Section("reproduce", "To reproduce", facts=tuple(facts)),
        ),
    )


def _told(contests: Sequence[Contest]) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """Who won by how much, per kind of data: in plain words, and as numbers with a label and a remark."""
    sentences, numbers = [], []
    for mixture, of in by_mixture(contests):
        uniform = [c for c in of if c.baseline in UNIFORM]
        measured = uniform or of
        mean = ratio(geometric_mean([c.speedup(OURS, c.baseline).mean for c in measured]))
        bound = ratio(geometric_mean([c.bound_over(c.baseline) for c in measured]))
        experts = [gain for c in of if not math.isnan(gain := c.over_experts.mean)]
        several = f", {ratio(min(experts))} to {ratio(max(experts))}" if len(experts) > 1 else ""
        parts = []
        if experts:
            parts.append(f"{ratio(geometric_mean(experts))} as fast as the best expert baseline{several}")
        if uniform:
            parts.append(f"{mean} as fast as the best uniform plan in arrival order that fits")
        if parts:
            gains = ", and ".join(parts)
            sentences.append(
                f"On data `{mixture}` dflop is {gains}. With every GPU busy all the time that would be {bound}."
            )
        if len(uniform) < len(of):
            none = " and ".join(c.setting.name for c in of if c.baseline not in UNIFORM)
            sentences.append(f"No uniform plan of {none} fits on data `{mixture}`, ours does.")
        remark = f"{len(measured)} settings, bound {bound}, geometric means"
        numbers.append((f"speedup on `{mixture}`, simulated", mean, remark))
    means = " Both are geometric means over the settings." if len(contests) > 1 else ""
    return " ".join(sentences) + means + " All figures are simulated.", tuple(numbers)


def _some_columns(title: str, found: SuiteResult, wanted: Collection[str]) -> Table:
    """Some columns of a table too wide for a page, and those that say what a row is about."""
    chosen = [i for i, name in enumerate(found.columns) if name in wanted or name in KEYS]
    return Table(
        title,
        tuple(found.columns[i] for i in chosen),
        tuple(tuple(row[i] for i in chosen) for row in found.rows),
        KEYS & frozenset(found.columns),
    )


def _words(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
