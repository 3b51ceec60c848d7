"""Examples of one target until its time is over.

Hypothesis draws, makes small, tells crashes apart and remembers them; a target is over with its first ones, and begins
with them the next time. Here is what it has not: an alarm that ends an example that takes too long, and a process with
bounds, which dies with its stacks where the time goes in a library that does not come back to Python.
"""

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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.targets import TARGETS

MEMORY_BYTES = 12 << 30
"""Address space of a target's process: what draws more than that is a crash, too."""
SLICE_EXAMPLES = 200
_HARD_S = 30.0
"""An example that ignores the alarm so long ends the process."""


class TooLong(Exception):
    """An example did not end within its deadline."""


def in_process(name: str, database: Path, seconds: float, first_seed: int) -> dict[str, Any]:
    """What `_fuzz` finds in another process; the death of that process is a crash, too."""
    with (
        tempfile.TemporaryDirectory(prefix="dflop-fuzz-") as folder,  # what a killed target leaves goes with it
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        try:
            return pool.submit(_fuzz, name, Path(folder), database.resolve() / name, seconds, first_seed).result()
        except BrokenProcessPool as error:
            last = Path(folder) / "last"
            example = last.read_text(encoding="utf-8") if last.is_file() else "none"
            crash = f"the process died: {error}\nexample={example}"
            return {"num_examples": 0, "elapsed_s": 0.0, "crashes": [crash]}


def _fuzz(name: str, folder: Path, database: Path, seconds: float, first_seed: int) -> dict[str, Any]:
    """Run examples of a target, a slice of them for each seed, until the time is over or crashes are small.

    The file `last` has the example in hand, should this process die. `crashes` are traces with the smallest examples.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what code under test prints is not ours to say
    signal.signal(signal.SIGALRM, _ring)
    target, work, num_examples, began_s = TARGETS[name], folder / "work", 0, time.monotonic()
    crashes: list[BaseException] = []
    options = settings(
        max_examples=SLICE_EXAMPLES, database=DirectoryBasedExampleDatabase(database), deadline=None,
        derandomize=False, suppress_health_check=list(HealthCheck), print_blob=False,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )  # fmt: skip

    def one(example: Any) -> None:
        nonlocal num_examples
        num_examples += 1
        (folder / "last").write_text(repr(example), encoding="utf-8")
        began_s = time.monotonic()
        faulthandler.dump_traceback_later(target.deadline_s + _HARD_S, exit=True, file=sys.__stderr__)
        signal.setitimer(signal.ITIMER_REAL, target.deadline_s, target.deadline_s)  # again where nobody heard it
        try:
            target.check(prepared, example)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RuntimeError(repr(error)) from error  # a panic of a library in Rust would end hypothesis
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        if time.monotonic() > began_s + target.deadline_s:
            raise TooLong("and that was swallowed")

    work.mkdir()
    with contextlib.chdir(work):
        prepared = target.prepare(work)
        for number in itertools.count(first_seed):
            try:
                options(seed(number)(given(target.examples)(one)))()  # `seed` behind `options` forgets the database
            except Exception as error:
                crashes += error.exceptions if isinstance(error, ExceptionGroup) else [error]
            if crashes or time.monotonic() > began_s + seconds:
                break
    traces = ["".join(traceback.format_exception(crash)) for crash in crashes]
    return {"num_examples": num_examples, "elapsed_s": time.monotonic() - began_s, "crashes": traces}


def _ring(*_: Any) -> None:
    raise TooLong
