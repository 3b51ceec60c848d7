"""The table of the fault campaign, from its JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tests.bench.markdown import table

OUTCOMES = ITSELF, AGAIN, MENDED, NOT_STRUCK, WRONG = (
    "goes on by itself", "same command goes on", "refused, mended, goes on", "not struck", "wrong",
)  # fmt: skip


def tables(content: dict[str, Any]) -> dict[str, str]:
    """A row per fault, a column per outcome, and in how many runs it was drawn, as `--json` of a campaign has them."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run in content["runs"]:
        for fault in run["faults"]:
            counts[fault["part"], fault["name"]][fault["outcome"]] += 1
    rows = [
        (part, name, str(sum(found.values())), *(str(found[outcome] or "") for outcome in OUTCOMES))
        for (part, name), found in sorted(counts.items())
    ]
    total = sum((found for found in counts.values()), Counter())
    last = ("all", f"{len(counts)} faults", str(len(content["runs"])), *(str(total[outcome]) for outcome in OUTCOMES))
    name = {"local": "chaos", "slurm": "chaos-slurm"}[content["backend"]]
    return {name: table(("part", "fault", "runs", *OUTCOMES), [*rows, last])}
