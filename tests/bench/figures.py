"""Figures of a benchmark: a time, its bound, and the obvious other way of doing the same, timed in the same run."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflop import __version__

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
_ROW_CHARS = 500
"""JSON up to this length is a line."""


@dataclass(frozen=True)
class Figure:
    """One measured figure."""

    name: str
    seconds: float
    bound_s: float | None
    """What it must not exceed; None where it is only shown."""
    other: str = ""
    """The obvious other way."""
    other_s: float | None = None
    """Its time in the same run; None where there is none."""
    min_ratio: float | None = None
    """How many times longer the other way must take; None where that is only shown."""
    note: str = ""

    @property
    def has_bound(self) -> bool:
        return self.bound_s is not None or self.min_ratio is not None

    @property
    def is_met(self) -> bool:
        in_time = self.bound_s is None or self.seconds <= self.bound_s
        return in_time and (self.min_ratio is None or (self.other_s or 0.0) >= self.min_ratio * self.seconds)


def line(f: Figure) -> str:
    """The figure on one line."""
    given = ((f.bound_s, " s"), (f.min_ratio, "x"))
    bounds = [f"{value:g}{unit}" for value, unit in given if value is not None]
    bound = f"bound {', '.join(bounds)}   {'ok' if f.is_met else 'MISSED'}" if bounds else ""
    other = f"   {f.other}: {f.other_s:.3f} s ({f.other_s / f.seconds:.1f}x)" if f.other_s is not None else ""
    return f"{f.name:44s} {f.seconds:8.3f} s   {bound:18s}{other}{f'   {f.note}' if f.note else ''}"


def machine(*libraries: str) -> dict[str, object]:
    """What the figures were measured on and with; `commit` and `is_dirty` are None outside a git checkout."""
    commit, is_dirty = revision()
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return {
        "cpu": models[0].strip() if models else platform.machine(), "num_cores": os.cpu_count(),
        "python": platform.python_version(), **{name: version(name) for name in libraries}, "dflop": __version__,
        "commit": commit, "is_dirty": is_dirty, "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def revision() -> tuple[str | None, bool | None]:
    """(commit, whether the tree has changes other than new results); None where that is unknown."""
    results = ":!tests/bench/results"
    head, changes = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", ".", results))
    )
    if head.returncode or changes.returncode:
        return None, None
    return head.stdout.strip(), bool(changes.stdout.strip())


def slug(found: Mapping[str, Any]) -> str:
    """Name of a machine for a folder, such as `2-core-amd-epyc`, from what `machine` says of it."""
    text = re.sub(r"^cpu: |\((r|tm)\)|\bcpu\b|@.*|\b\d+-core\b|\bprocessor\b", " ", str(found["cpu"]).lower())
    return "-".join([f"{found['num_cores']}-core", *re.findall(r"[a-z0-9]+", text)])


def json_text(content: Mapping[str, Any]) -> str:
    """A file that people can read and compare: a line per row, what is longer indented."""
    return _lines(content, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    text = json.dumps(value)
    if not value or not isinstance(value, dict | list) or (indent and len(text) <= _ROW_CHARS):
        return text
    inner = f"{indent} "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_lines(of, inner)}" for name, of in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _lines(of, inner) for of in value) + f"\n{indent}]"


def conclude(
    content: Mapping[str, Any], bounds: Iterable[tuple[str, bool]], path: Path | None, *libraries: str
) -> None:
    """Writes a benchmark's figures where that is wanted, and ends the process with 1 when a bound was missed.

    Args:
        content: The figures; the machine, the number of bounds and the names of those missed come with them.
        bounds: (name, whether it was met).
        path: File to write; None for none.
        libraries: Distributions whose versions matter.
    """
    bounds = list(bounds)
    missed = [name.strip() for name, is_met in bounds if not is_met]
    if path:
        whole = {"machine": machine(*libraries), "num_bounds": len(bounds), "missed": missed, **content}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_text(whole))
    if missed:
        sys.exit("bound missed: " + "; ".join(missed))


def finish(figures: Iterable[Figure], path: Path | None, *libraries: str) -> None:
    """Concludes a benchmark of figures, each of which is printed when it is there."""
    found = []
    for figure in figures:
        found.append(figure)
        print(line(figure), flush=True)
    bounds = [(f.name, f.is_met) for f in found if f.has_bound]
    conclude({"figures": [asdict(f) for f in found]}, bounds, path, *libraries)
