"""Examples of one target until its time is over: every crash once, at its smallest.

Hypothesis draws, makes small and remembers, in slices of `SLICE_EXAMPLES` with a seed each. A crash is named by its
exception and the place in dflop it came from; later slices look for others. An alarm ends an example that takes too
long; where the time goes in a library that does not come back to Python, the process ends with its stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import dflop
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

MEMORY_BYTES = 12 << 30
"""Address space of a target's process: what draws more than that is a crash, too."""
SLICE_EXAMPLES = 100
SHRINK_S = 20.0
_PACKAGE = Path(dflop.__file__).resolve().parent
_HARD_S = 30.0
"""An example that ignores the alarm so long ends the process."""


class TooLong(Exception):
    """An example did not end within its deadline."""


@dataclass(frozen=True)
class Crash:
    """One way a target fails."""

    name: str
    """Exception and place."""
    seed: int
    """Of the slice that found it."""
    example: str
    """The smallest one seen, as Python writes it."""
    trace: str = ""


@dataclass
class Campaign:
    """What came of a target so far; the file `last` has the example in hand, should this process die."""

    target: Target
    check: Callable[[Any], Any]
    last: Path
    num_examples: int = 0
    elapsed_s: float = 0.0
    crashes: dict[str, Crash] = field(default_factory=dict)

    def slice(self, number: int, until_s: float, options: settings) -> None:
        """Draw examples with a seed; what crashes is made small for a while."""
        new: dict[str, Crash] = {}

        def one(example: Any) -> None:
            nonlocal until_s
            if time.monotonic() > until_s and self.num_examples:
                return  # hypothesis calls that flaky where it makes a crash small, and ends
            self.num_examples += not new
            self.last.write_text(repr(example), encoding="utf-8")
            try:
                with _limit(self.target.deadline_s):
                    self.check(example)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                name = name_of(error)
                if name in self.crashes:
                    return
                until_s = until_s if new else time.monotonic() + SHRINK_S
                crash = Crash(name, number, repr(example), traceback.format_exc())
                new[name] = min(new.get(name, crash), crash, key=lambda c: (len(c.example), c.example))
                if isinstance(error, Exception):
                    raise
                raise RuntimeError(name) from error  # a panic of a library in Rust, or an exit, would end hypothesis

        try:
            options(seed(number)(given(self.target.examples)(one)))()  # `seed` behind `options` forgets the database
        except unittest.SkipTest:
            pass  # the database has nothing
        except Exception:
            if not new:
                raise  # not of an example: the strategy is wrong
        self.crashes |= new


def fuzz(
    target: Target, folder: Path, *, seconds: float, first_seed: int, database: Path, max_slices: int = 1 << 40
) -> Campaign:
    """Run examples of a target for a bounded time; what `database` has, and one more, are run in any case."""
    options = settings(
        max_examples=SLICE_EXAMPLES, database=DirectoryBasedExampleDatabase(database / target.name), deadline=None,
        derandomize=False, suppress_health_check=list(HealthCheck), print_blob=False, phases=(Phase.reuse,),
    )  # fmt: skip
    work = folder / "work"
    work.mkdir()
    with contextlib.chdir(work):
        campaign = Campaign(target, partial(target.check, target.prepare(work)), folder / "last")
        began_s = time.monotonic()
        campaign.slice(first_seed, float("inf"), options)
        for number in range(first_seed, first_seed + max_slices):
            campaign.slice(number, began_s + seconds, settings(options, phases=(Phase.generate, Phase.shrink)))
            campaign.elapsed_s = time.monotonic() - began_s
            if campaign.elapsed_s > seconds:
                break
    return campaign


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


def name_of(error: BaseException) -> str:
    """Exception and the innermost line of dflop, or of the target where dflop was not in."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    last = (mine or [frame for frame in frames if "/tests/fuzz/" in frame.filename])[-1]
    path = Path(last.filename)
    place = path.relative_to(_PACKAGE.parent) if mine else path.name
    words = f": {error}"[:80] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} in {place}:{last.lineno} {last.name}{words}"


def in_process(name: str, database: Path, seconds: float, first_seed: int) -> tuple[int, float, list[Crash]]:
    """What `fuzz` finds in another process: examples, seconds, crashes; the death of that process is one, too."""
    with (
        tempfile.TemporaryDirectory(prefix="dflop-fuzz-") as folder,  # what a killed target leaves goes with it
        ProcessPoolExecutor(1, get_context("spawn"), _bound, (folder,)) as pool,
    ):
        try:
            return pool.submit(_run, name, Path(folder), database.resolve(), seconds, first_seed).result()
        except BrokenProcessPool as error:
            last = Path(folder) / "last"
            example = last.read_text(encoding="utf-8") if last.is_file() else "none"
            return 0, 0.0, [Crash("the process died", first_seed, example, str(error))]


def _bound(folder: str) -> None:
    """Of the process of a target; and what code under test prints is not ours to say."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(name: str, folder: Path, database: Path, seconds: float, first_seed: int) -> tuple[int, float, list[Crash]]:
    found = fuzz(TARGETS[name], folder, seconds=seconds, first_seed=first_seed, database=database)
    return found.num_examples, found.elapsed_s, list(found.crashes.values())
