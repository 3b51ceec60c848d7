"""What fuzzing found, as a table of a page."""

from __future__ import annotations

from typing import Any

from tests.bench.markdown import table


def tables(content: dict[str, Any]) -> dict[str, str]:
    """Tables in Markdown by name, from the JSON that `python -m tests.fuzz --json FILE` writes."""
    found = [(f"`{of['target']}`", of["what"], of["num_examples"], of["elapsed_s"], len(of["crashes"]))
             for of in content["targets"]]  # fmt: skip
    rows = [*found, ("all", "", *(sum(row[column] for row in found) for column in (2, 3, 4)))]
    shown = [(name, what, f"{num:,}", f"{seconds:.0f}", str(crashes)) for name, what, num, seconds, crashes in rows]
    return {"fuzz": table(("target", "what is drawn", "examples", "seconds", "crashes"), shown)}
