"""What an examination says: one finding per thing looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflop.errors import DflopError

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
"""Works; works less well or may not be wanted; does not work; not looked at, or not there and not asked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    area: str
    name: str
    status: str
    """`ok`, `warn`, `fail` or `skip`."""
    detail: str
    """What was found, with values."""
    advice: str = ""
    """What to do about it."""


def checked(area: str, name: str, check: Callable[[], str]) -> Finding:
    """The finding of a check that returns what is well, and raises what is not."""
    try:
        return Finding(area, name, OK, check())
    except DflopError as error:
        where = f" ({error.where})" if error.where and error.where not in error.what else ""
        return Finding(area, name, FAIL, f"{' '.join(error.what.split())}{where}", error.hint)
    except OSError as error:
        return Finding(area, name, FAIL, f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
