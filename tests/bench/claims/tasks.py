"""What claims are tested by, done side by side: each piece of work once, whoever asks for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from dflop.errors import InfeasiblePlanError

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


Found = Mapping[Task, Any]
"""Results, None where no plan fits."""


def run_all(tasks: Iterable[Task], say: Say) -> dict[Task, Any]:
    """Results of all of them, as many at a time as there are cores, begun in the order in which they are listed."""
    wanted = list(dict.fromkeys(tasks))
    found: dict[Task, Any] = {}
    started = time.perf_counter()
    with ProcessPoolExecutor(max(1, min(len(wanted), len(os.sched_getaffinity(0))))) as pool:
        running = {pool.submit(task): task for task in wanted}
        for done in as_completed(running):
            task = running[done]
            found[task] = done.result()
            nothing = "" if found[task] is not None else ": no plan fits"
            say(f"[{len(found)}/{len(wanted)}, {time.perf_counter() - started:.0f} s] {task.name}{nothing}")
    return found
