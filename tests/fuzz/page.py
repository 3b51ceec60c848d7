"""What fuzzing found, as tables of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.bench.markdown import table


def tables(content: dict[str, Any]) -> dict[str, str]:
    """Tables in Markdown by name, from the JSON that `python -m tests.fuzz --json FILE` writes."""
    rows = [
        (f"`{found['target']}`", found["what"], *_counts(found["num_examples"], found["elapsed_s"], found["crashes"]))
        for found in content["targets"]
    ]
    examples = sum(found["num_examples"] for found in content["targets"])
    seconds = sum(found["elapsed_s"] for found in content["targets"])
    crashes = [crash for found in content["targets"] for crash in found["crashes"]]
    last = ("all", "", *_counts(examples, seconds, crashes))
    return {"fuzz": table(("target", "what is drawn", "examples", "seconds", "crashes"), [*rows, last])}


def _counts(num_examples: int, seconds: float, crashes: Sequence[Any]) -> tuple[str, str, str]:
    return f"{num_examples:,}", f"{seconds:.0f}", str(len(crashes))
