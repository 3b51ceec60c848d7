"""The table of the fault campaign, from its JSON."""

from collections import Counter, defaultdict
from typing import Any

from tests.bench.markdown import table

OUTCOMES = ITSELF, AGAIN, MENDED, NOT_STRUCK, WRONG = (
    "goes on by itself", "same command goes on", "refused, mended, goes on", "not struck", "wrong",
)  # fmt: skip
SHOWN = "recovered by itself", "resumed by the same command", "refused, fixed, resumed", "did not strike", "wrong"


def tables(content: dict[str, Any]) -> dict[str, str]:
    """A row per part that faults struck, a column per outcome, as `--json` of a campaign has them."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    names: dict[str, set[str]] = defaultdict(set)
    for fault in (fault for run in content["runs"] for fault in run["faults"]):
        for part in (fault["part"], "~all"):
            counts[part][fault["outcome"]] += 1
            names[part].add(fault["name"])
    rows = [
        (part.strip("~"), str(len(names[part])), *(str(found[outcome]) for outcome in OUTCOMES))
        for part, found in sorted(counts.items())
    ]
    name = {"local": "chaos", "slurm": "chaos-slurm"}[content["backend"]]
    return {name: table(("part", "kinds of faults", *SHOWN), rows)}
