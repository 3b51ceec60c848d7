"""What a thread is doing, in words: set where it is done, read by whoever wants to know why nothing moves."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """What it means when an activity takes long."""

    WORKS = "works"
    """The thread itself is stuck."""
    WAITS = "waits"
    """Somebody else is, unless everybody waits."""
    MAY_LAST = "may last"
    """Nothing: models are loaded and files written as long as it takes."""


@dataclass(frozen=True, slots=True)
class Doing:
    """One activity and its beginning."""

    what: str
    mode: Mode
    since_s: float
    """Monotonic."""


class Activity:
    """What one thread is doing. That thread sets it; any other may read `now`."""

    def __init__(self) -> None:
        self.step = -1
        """Step that it is done for; -1: none yet."""
        self.thread_id = 0
        self.now = Doing("starts", Mode.MAY_LAST, time.monotonic())

    def works(self, what: str) -> None:
        """It computes or reads, alone."""
        self._begin(what, Mode.WORKS)

    def waits(self, what: str) -> None:
        """It waits for other ranks."""
        self._begin(what, Mode.WAITS)

    def may_last(self, what: str) -> None:
        """It does something that nobody can say the duration of."""
        self._begin(what, Mode.MAY_LAST)

    def _begin(self, what: str, mode: Mode) -> None:
        where = what if self.step < 0 else f"step {self.step}, {what}"
        self.thread_id = threading.get_ident()
        self.now = Doing(where, mode, time.monotonic())


@dataclass(frozen=True, slots=True)
class Activities:
    """Of the two threads of a rank that ranks wait for."""

    main: Activity = field(default_factory=Activity)
    """The one that computes."""
    feed: Activity = field(default_factory=Activity)
    """The one that prepares the step ahead."""
