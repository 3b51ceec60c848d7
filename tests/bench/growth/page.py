"""The growth of every part as a table for documents."""

from __future__ import annotations

from typing import Any

from tests.bench.markdown import table


def tables(content: dict[str, Any]) -> dict[str, str]:
    """`growth`: a row per part, what exceeds its bound most first.

    Args:
        content: What `python -m tests.bench.growth --json FILE` wrote.
    """
    head = ("part", "sizes", "seconds", "exponent", "at most", "peak MiB", "exponent", "why")
    return {"growth": table(head, map(_row, content["figures"]))}


def _row(figure: dict[str, Any]) -> tuple[str, ...]:
    points = figure["points"]
    sizes = f"{points[0]['size']:,} to {points[-1]['size']:,}" if points else ""
    seconds = f"{points[0]['cpu_s']:.2g} to {points[-1]['cpu_s']:.2g}" if points else ""
    peak = f"{points[-1]['peak_bytes'] / 2**20:.0f}" if points else ""
    name = f"**{figure['name']}**" if figure["is_above"] else figure["name"]
    why = f"not measured: {figure['problem']}" if figure["problem"] else figure["why"]
    return (
        name, sizes, seconds, _number(figure["exponent"]), f"{figure['bound']:g}", peak,
        _number(figure["memory_exponent"]), why,
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
