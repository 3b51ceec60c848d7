"""What fuzzing found, as tables of a page."""

from __future__ import annotations

from typing import Any


def tables(content: dict[str, Any]) -> dict[str, str]:
    """Tables in Markdown by name, from the JSON that `python -m tests.fuzz --json FILE` writes."""
    rows = [
        f"| `{found['target']}` | {found['what']} | {found['num_examples']:,} | {found['elapsed_s']:.0f} | "
        f"{len(found['crashes'])} |"
        for found in content["targets"]
    ]
    examples = sum(found["num_examples"] for found in content["targets"])
    seconds = sum(found["elapsed_s"] for found in content["targets"])
    crashes = sum(len(found["crashes"]) for found in content["targets"])
    head = ["| target | what is drawn | examples | seconds | crashes |", "|---|---|---:|---:|---:|"]
    last = f"| all | | {examples:,} | {seconds:.0f} | {crashes} |"
    return {"fuzz": "\n".join([*head, *rows, last])}
