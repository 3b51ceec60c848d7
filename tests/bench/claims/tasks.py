"""What claims are tested by, done side by side: each piece of work once, whoever asks for it."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import InfeasiblePlanError
from tests.bench.figures import revision

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A call of a function of some module here, by value."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    name: str

    def __call__(self) -> Any:
        """The result; None where no plan fits."""
        try:
            return self.run(*self.args)
        except InfeasiblePlanError:
            return None


Revision = tuple[str | None, bool | None]
"""As `figures.revision` has it."""
Found = Mapping[Task, Any]
"""Results, None where no plan fits."""


def run_all(tasks: Iterable[Task], say: Say, pieces: Path | None = None) -> dict[Task, Any]:
    """Results of all of them, as many at a time as there are cores, begun in the order in which they are listed.

    Args:
        tasks: Each is done once.
        say: Hears of every result.
        pieces: Results so far, of a run that did not get to its end; every new one is added.
    """
    wanted = list(dict.fromkeys(tasks))
    found = {task: result for task, result, _ in _kept(pieces) if task in set(wanted)}
    started, made_by = time.perf_counter(), revision()
    with ProcessPoolExecutor(max(1, min(len(wanted), len(os.sched_getaffinity(0))))) as pool:
        running = {pool.submit(task): task for task in wanted if task not in found}
        for done in as_completed(running):
            task = running[done]
            found[task] = done.result()
            if pieces:
                with pieces.open("ab") as file:
                    pickle.dump((task, found[task], made_by), file)
            nothing = "" if found[task] is not None else ": no plan fits"
            say(f"[{len(found)}/{len(wanted)}, {time.perf_counter() - started:.0f} s] {task.name}{nothing}")
    return found


def revisions(pieces: Path | None) -> list[Revision]:
    """Of the code that made the pieces: what tells them may have been mended since."""
    return sorted({made_by for _, _, made_by in _kept(pieces)}, key=str)


def _kept(pieces: Path | None) -> Iterator[tuple[Task, Any, Revision]]:
    if pieces and pieces.exists():
        with pieces.open("rb") as file, contextlib.suppress(EOFError):
            while True:
                yield pickle.load(file)
