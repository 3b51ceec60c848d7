"""Examples of one target until its time is over: every crash kept once, at its smallest.

Hypothesis draws; it is not told of a crash at once, because it would stop looking for others. A crash is named by its
exception and the place in dflop it came from. What is new is sought again from the same seed and made small, within a
bounded time. An alarm ends an example that takes too long, and where the time goes in a library that does not come back
to Python, the process ends with the stack of all threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

import dflop
from tests.fuzz.target import Check, Target, written

ROUND_EXAMPLES = 100
SHRINK_S = 20.0
_PACKAGE = Path(dflop.__file__).resolve().parent
_HARD_FACTOR = 3
"""An example that ignores the alarm so many deadlines long ends the process."""


class TooLong(Exception):
    """An example did not end within its deadline."""


@dataclass(frozen=True)
class Crash:
    """One way a target fails, and the smallest example seen of it."""

    name: str
    """Exception and place."""
    example: str
    trace: str
    seed: int

    @property
    def file_name(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:10]


@dataclass
class Found:
    """What came of one target."""

    target: str
    num_examples: int = 0
    elapsed_s: float = 0.0
    crashes: dict[str, Crash] = field(default_factory=dict)


def fuzz(
    target: Target, folder: Path, *, seconds: float, first_seed: int, max_rounds: int | None = None,
    last: Path | None = None, say: Callable[[str], None] = lambda _line: None,
) -> Found:  # fmt: skip
    """Run examples of a target for a bounded time.

    Args:
        target: Which.
        folder: Empty, for the target to work in.
        seconds: How long; making crashes small comes on top.
        first_seed: Seed of the first round of `ROUND_EXAMPLES`; the next rounds count up from it.
        max_rounds: Rounds at most; None: as many as there is time for.
        last: File that holds the example in hand, for whoever finds this process dead.
        say: Told of every new crash.
    """
    check, found = target.prepare(folder), Found(target.name)
    started = time.monotonic()
    number = first_seed
    while number == first_seed or (time.monotonic() - started < seconds and number - first_seed != max_rounds):
        known = set(found.crashes)
        _round(target, check, found, number, started + seconds, last)
        for name in sorted(set(found.crashes) - known):
            say(f"{target.name}: {name}")
            _shrink(target, check, found, number, name, last)
        number += 1
    found.elapsed_s = time.monotonic() - started
    return found


def run_once(target: Target, check: Check, example: Any, last: Path | None = None) -> tuple[str, str] | None:
    """The name and the trace of the crash that an example is; None where all is well."""
    if last is not None:
        last.write_text(written(example), encoding="utf-8", errors="surrogatepass")
    fired = False

    def ring(_number: int, _frame: FrameType | None) -> None:
        nonlocal fired
        fired = True
        raise TooLong(f"not done after {target.deadline_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    faulthandler.dump_traceback_later(target.deadline_s * _HARD_FACTOR, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, target.deadline_s)
    try:
        check(example)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        signal.setitimer(signal.ITIMER_REAL, 0)  # a ring while the crash is told would end the campaign
        return _name_of(error), traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
    if fired:
        return "TooLong, and swallowed", f"not done after {target.deadline_s:g} s"
    return None


def _round(target: Target, check: Check, found: Found, number: int, until: float, last: Path | None) -> None:
    for example in _drawn(target, number):
        if time.monotonic() > until and found.num_examples:
            return
        found.num_examples += 1
        _note(found, run_once(target, check, example, last), example, number)


def _drawn(target: Target, number: int) -> Iterator[Any]:
    """The examples of one seed, in the order in which hypothesis draws them."""
    examples: list[Any] = []
    _run(target, number, examples.append, (Phase.generate,))
    yield from examples


def _shrink(target: Target, check: Check, found: Found, number: int, name: str, last: Path | None) -> None:
    until = time.monotonic() + SHRINK_S

    def fail(example: Any) -> None:
        if time.monotonic() > until:
            return  # hypothesis calls that flaky, and ends
        crash = run_once(target, check, example, last)
        if crash is not None and crash[0] == name:
            _note(found, crash, example, number)
            raise AssertionError(name)

    with contextlib.suppress(Exception):  # what it found is noted; how hypothesis tells of it does not matter
        _run(target, number, fail, (Phase.generate, Phase.shrink))


def _run(target: Target, number: int, test: Callable[[Any], None], phases: tuple[Phase, ...]) -> None:
    @seed(number)
    @settings(
        max_examples=ROUND_EXAMPLES, database=None, deadline=None, phases=phases,
        suppress_health_check=list(HealthCheck), print_blob=False, derandomize=False,
    )  # fmt: skip
    @given(target.examples())
    def run(example: Any) -> None:
        test(example)

    run()


def _note(found: Found, crash: tuple[str, str] | None, example: Any, number: int) -> None:
    if crash is None:
        return
    name, trace = crash
    text = written(example)
    known = found.crashes.get(name)
    if known is None or (len(text), text) < (len(known.example), known.example):
        found.crashes[name] = Crash(name, text, trace, number)


def _name_of(error: BaseException) -> str:
    """Exception and the innermost line of dflop, or of the target where dflop was not in."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if Path(f.filename).is_relative_to(_PACKAGE)]
    mine = mine or [f for f in frames if "/tests/fuzz/targets/" in f.filename] or list(frames)
    last = mine[-1]
    path = Path(last.filename)
    place = path.relative_to(_PACKAGE.parent) if path.is_relative_to(_PACKAGE) else path.name
    words = f": {error}"[:80] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} in {place}:{last.lineno} {last.name}{words}"
