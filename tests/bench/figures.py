"""Figures of a benchmark: a time, its bound, and the obvious other way of doing the same, timed in the same run."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from dflop import __version__


@dataclass(frozen=True)
class Figure:
    """One measured figure."""

    name: str
    seconds: float
    bound_s: float | None
    """What it must not exceed; None where it is only told."""
    other: str
    """The obvious other way."""
    other_s: float | None
    """Its time in the same run; None where there is none."""
    min_ratio: float | None = None
    """How many times longer the other way must take; None where that is only told."""
    note: str = ""

    @property
    def is_met(self) -> bool:
        in_time = self.bound_s is None or self.seconds <= self.bound_s
        return in_time and (self.min_ratio is None or (self.other_s or 0.0) >= self.min_ratio * self.seconds)


def line(f: Figure) -> str:
    """The figure on one line."""
    given = ((f.bound_s, " s"), (f.min_ratio, "x"))
    bounds = [f"{value:g}{unit}" for value, unit in given if value is not None]
    bound = f"bound {', '.join(bounds)}   {'ok' if f.is_met else 'MISSED'}" if bounds else ""
    beside = f"   {f.other}: {f.other_s:.3f} s ({f.other_s / f.seconds:.1f}x)" if f.other_s is not None else ""
    return f"{f.name:44s} {f.seconds:8.3f} s   {bound:18s}{beside}{f'   {f.note}' if f.note else ''}"


def machine(*libraries: str) -> dict[str, object]:
    """What the figures were measured on and with."""
    return {
        "cpu": next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if "model name" in x), platform.machine()),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
        "dflop": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def finish(figures: list[Figure], path: Path | None, *libraries: str) -> None:
    """Writes the figures where that is wanted; ends the process with 1 when a bound was missed."""
    if path:
        content = {"machine": machine(*libraries), "figures": [asdict(f) for f in figures]}
        path.write_text(json.dumps(content, indent=1) + "\n")
    if missed := [f.name.strip() for f in figures if not f.is_met]:
        sys.exit("bound missed: " + ", ".join(missed))
