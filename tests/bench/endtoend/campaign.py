"""Every case of the bench, one after the other, and the file that keeps what was measured so far."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflop.jobs.talk import say
from dflop.schedule.warm import warm
from tests.bench.endtoend.arms import profiled_run
from tests.bench.endtoend.datasets import DEMO, MEDIA, make_files
from tests.bench.endtoend.outcome import Case, measure
from tests.bench.endtoend.summary import summaries
from tests.bench.figures import machine

PROCESSES = (2, 4)


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    num_seeds: int
    num_counted: int
    """Steps of an arm that are counted."""
    global_batch_size: int
    profile_budget_s: float


SMALL, FULL = Size(1, 4, 16, 8.0), Size(5, 8, 24, 30.0)


def run(size: Size, media: Path | None, path: Path | None) -> dict[str, Any]:
    """Measure what a file does not hold yet; everything, for JSON.

    Args:
        size: How much is trained.
        media: Folder of real media; None: the demo data alone.
        path: Where figures are kept, case by case; None: nowhere.

    Raises:
        SystemExit: the file is of another machine, version or size.
        RuntimeError: a training failed, or the arms did not train the same.
    """
    content = begun(path, size)
    missing = [
        case for case in wanted(size, media is not None) if not any(has(seed, case) for seed in content["seeds"])
    ]
    warm()  # compiling is no part of planning
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        for number, found in enumerate(measured(missing, Path(folder), media, size), 1):
            content["seeds"].append(found)
            keep(path, content)
            say(f"{number} of {len(missing)} done")
    return content


def wanted(size: Size, has_media: bool) -> list[Case]:
    """All data by all numbers of processes; with one seed, where minutes count, both of each and not all pairs."""
    pairs = list(itertools.product((DEMO, MEDIA) if has_media else (DEMO,), PROCESSES))
    if has_media and size.num_seeds == 1:
        pairs = [(DEMO, max(PROCESSES)), (MEDIA, min(PROCESSES))]
    return [Case(data, num_processes, seed) for data, num_processes in pairs for seed in range(size.num_seeds)]


def measured(cases: Sequence[Case], folder: Path, media: Path | None, size: Size) -> Iterator[dict[str, Any]]:
    """Figures of one case after the other; neighbours with the same data and processes share a profile."""
    for (data, num_processes), seeds in itertools.groupby(cases, key=lambda case: (case.data, case.num_processes)):
        own = folder / f"{data}-{num_processes}"
        own.mkdir()
        say(f"{data}, {num_processes} processes: profiles")
        profiled = profiled_run(
            own, make_files(data, folder, media), num_processes, say,
            f"plan.global_batch_size={size.global_batch_size}", f"model_profile.budget_s={size.profile_budget_s}",
        )  # fmt: skip
        for case in seeds:
            began_s, of_seed = time.monotonic(), own / f"seed-{case.seed}"
            found = measure(case, profiled, of_seed, size.num_counted, say)
            shutil.rmtree(of_seed)
            say(f"{case.name}: {time.monotonic() - began_s:.0f} s")
            yield found


def begun(path: Path | None, size: Size) -> dict[str, Any]:
    """What a file has already, or nothing.

    Raises:
        SystemExit: the file is of another machine, version or size.
    """
    mine = {"machine": machine("torch", "transformers", "numba"), "settings": asdict(size), "seeds": []}
    if path is None or not path.is_file():
        return mine
    content: dict[str, Any] = json.loads(path.read_text())
    for name in ("machine", "settings"):
        if {**content.get(name, {}), "date": ""} != {**mine[name], "date": ""}:
            raise SystemExit(f"{path} was measured with {name} {content.get(name)}, not {mine[name]}: remove it first")
    return content


def has(found: Mapping[str, Any], case: Case) -> bool:
    """Whether figures are those of a case."""
    return all(found[name] == value for name, value in asdict(case).items())


def keep(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write what there is so far."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    summary = [asdict(s) for s in summaries(content["seeds"])]
    temporary.write_text(json.dumps({**content, "summary": summary}, indent=1) + "\n")
    temporary.replace(path)
