"""A target: what is drawn, what is done with it, and what may come of it.

What may come of an example is success or a `DflopError` that a person can read. Anything else is a crash: another
exception, a hang, or a broken promise that the target looks at itself (a row lost, a file that is neither read nor
refused), which it says with `assert`.
"""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from dflop.errors import DflopError

T = TypeVar("T")
Strategy = st.SearchStrategy[Any]
EXIT_CODES = (0, 1, 2, 3, 4, 5, 75)
"""Those that docs/operating.md lists."""


@dataclass(frozen=True)
class Target:
    """One door to the outside."""

    name: str
    what: str
    """What is drawn, for people."""
    examples: Strategy
    check: Callable[[Any, Any], Any]
    """Given what `prepare` has made, runs one example."""
    prepare: Callable[[Path], Any] = lambda folder: folder
    """Given an empty folder, what all examples share; examples may write into the folder."""
    quick: int = 8
    """Examples in the suite of tests."""
    deadline_s: float = 20.0
    """An example that takes longer hangs."""


def attempt(call: Callable[..., T], *args: Any, **options: Any) -> T | None:
    """What a call gives, or None where it refuses in words."""
    try:
        return call(*args, **options)
    except DflopError as error:
        check_words(error)
        return None


def check_words(error: DflopError) -> None:
    """An error must say what happened, in a length that a person reads."""
    assert error.what.strip(), "an error without words"
    assert len(str(error)) < 20_000, f"an error of {len(str(error))} characters"
    assert error.exit_code in EXIT_CODES


def check_reason(reason: str, max_chars: int = 1000) -> None:
    """What was left out says why, on a line."""
    assert reason.strip(), "a reason without words"
    assert len(reason.splitlines()) == 1, "a reason of several lines"
    assert len(reason) < max_chars, f"a reason of {len(reason)} characters"


@functools.cache
def made(make: Callable[[Path], Any]) -> Path:
    """A folder with what is sound, made once in a process; examples break copies."""
    folder = Path(tempfile.mkdtemp(prefix="dflop-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make(folder)
    return folder
