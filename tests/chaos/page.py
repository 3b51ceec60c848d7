"""The table of the fault campaign, from its JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tests.bench.markdown import table
from tests.chaos.campaign import AGAIN, ITSELF, MENDED, NOT_STRUCK, WRONG

_NAMES = {"local": "chaos", "slurm": "chaos-slurm"}
_COLUMNS = (ITSELF, AGAIN, MENDED, NOT_STRUCK, WRONG)


def tables(content: dict[str, Any]) -> dict[str, str]:
    """Named Markdown tables.

    Args:
        content: As `python -m tests.chaos --json` writes it.
    """
    return {_NAMES[content["backend"]]: faults_by_outcome(content["runs"])}


def faults_by_outcome(runs: list[Mapping[str, Any]]) -> str:
    """A row per fault, a column per outcome, and in how many runs it was drawn."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run in runs:
        for fault in run["faults"]:
            counts[fault["part"], fault["name"]][fault["outcome"]] += 1
    rows = [
        (part, name, str(sum(found.values())), *(str(found[outcome] or "") for outcome in _COLUMNS))
        for (part, name), found in sorted(counts.items())
    ]
    total = sum((found for found in counts.values()), Counter())
    last = ("all", f"{len(counts)} faults", str(len(runs)), *(str(total[outcome]) for outcome in _COLUMNS))
    return table(("part", "fault", "runs", *_COLUMNS), [*rows, last])
