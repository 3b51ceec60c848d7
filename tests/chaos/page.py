"""The table of the fault campaign, from its JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

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
    lines = [
        f"| part | fault | runs | {' | '.join(_COLUMNS)} |",
        f"|---|---|---|{'---|' * len(_COLUMNS)}",
    ]
    for (part, name), found in sorted(counts.items()):
        cells = " | ".join(str(found[outcome] or "") for outcome in _COLUMNS)
        lines.append(f"| {part} | {name} | {sum(found.values())} | {cells} |")
    total = sum((found for found in counts.values()), Counter())
    cells = " | ".join(str(total[outcome]) for outcome in _COLUMNS)
    lines.append(f"| all | {len(counts)} faults | {len(runs)} | {cells} |")
    return "\n".join(lines) + "\n"
