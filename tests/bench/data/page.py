"""Profiling of datasets, for documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bench.markdown import table


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`data`: a row per figure, beside the obvious other way."""
    head = ("one core, single run", "dflop", "", "the other way", "")
    return {"data": table(head, [_row(figure) for figure in content["figures"]])}


def _row(figure: Mapping[str, Any]) -> tuple[str, ...]:
    took_s, other_s = figure["seconds"], figure["other_s"]
    name = f"{figure['name'].strip()[0].upper()}{figure['name'].strip()[1:]}"
    other = (f"{figure['other']}, {other_s:,.1f} s", f"{other_s / took_s:.1f}x") if other_s is not None else ("", "")
    return (name, f"{took_s:.1f} s", figure["note"], *other)
