"""Examples of one target until its time is over.

Hypothesis draws, makes small, tells crashes apart and remembers them; a target is over with its first ones, and begins
with them the next time. Here is what it has not: an alarm that ends an example that takes too long, and a process with
bounds, which dies with its stacks where the time goes in a library that does not come back to Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

MEMORY_BYTES = 12 << 30
"""Address space of a target's process: what draws more than that is a crash, too."""
SLICE_EXAMPLES = 1000
_HARD_S = 30.0
"""An example that ignores the alarm so long ends the process."""


class TooLong(Exception):
    """An example did not end within its deadline."""


def fuzz(target: Target, folder: Path, *, seconds: float, seeds: Iterable[int], database: Path) -> dict[str, Any]:
    """Run examples of a target, a slice of them for each seed, until the time is over or a crash is small.

    The file `last` has the example in hand, should this process die. `crashes` are traces with the smallest examples.
    """
    found, has_crashed, began_s = {"num_examples": 0, "elapsed_s": 0.0, "crashes": []}, False, time.monotonic()
    options = settings(
        max_examples=SLICE_EXAMPLES, database=DirectoryBasedExampleDatabase(database / target.name), deadline=None,
        derandomize=False, suppress_health_check=list(HealthCheck), print_blob=False,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )  # fmt: skip

    def one(example: Any) -> None:
        nonlocal has_crashed
        if found["num_examples"] and not has_crashed and time.monotonic() > began_s + seconds:
            raise unittest.SkipTest  # ends hypothesis
        found["num_examples"] += not has_crashed
        (folder / "last").write_text(repr(example), encoding="utf-8")
        try:
            with _limit(target.deadline_s):
                target.check(prepared, example)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            has_crashed = True
            if isinstance(error, Exception):
                raise
            raise RuntimeError(repr(error)) from error  # a panic of a library in Rust would end hypothesis

    (folder / "work").mkdir()
    with contextlib.chdir(folder / "work"):
        prepared = target.prepare(folder / "work")
        try:
            for number in seeds:
                options(seed(number)(given(target.examples)(one)))()  # `seed` behind `options` forgets the database
        except unittest.SkipTest:
            pass
        except Exception as error:
            if not has_crashed:
                raise  # not of an example: the strategy is wrong
            crashes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
            found["crashes"] = ["".join(traceback.format_exception(crash)) for crash in crashes]
    return {**found, "elapsed_s": time.monotonic() - began_s}


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in the block, and behind it where something swallowed that."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooLong(f"not done after {seconds:g} s")

    before, ends_s = signal.signal(signal.SIGALRM, ring), time.monotonic() + seconds
    faulthandler.dump_traceback_later(seconds + _HARD_S, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again where nobody heard it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() > ends_s:
        raise TooLong(f"not done after {seconds:g} s, and swallowed")


def in_process(name: str, database: Path, seconds: float, first_seed: int) -> dict[str, Any]:
    """What `fuzz` finds in another process; the death of that process is a crash, too."""
    with (
        tempfile.TemporaryDirectory(prefix="dflop-fuzz-") as folder,  # what a killed target leaves goes with it
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        try:
            return pool.submit(_bounded, name, Path(folder), database.resolve(), seconds, first_seed).result()
        except BrokenProcessPool as error:
            last = Path(folder) / "last"
            example = last.read_text(encoding="utf-8") if last.is_file() else "none"
            crash = f"the process died: {error}\nexample={example}"
            return {"num_examples": 0, "elapsed_s": 0.0, "crashes": [crash]}


def _bounded(name: str, folder: Path, database: Path, seconds: float, first_seed: int) -> dict[str, Any]:
    """In the process of a target; and what code under test prints is not ours to say."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return fuzz(TARGETS[name], folder, seconds=seconds, seeds=itertools.count(first_seed), database=database)
