"""What ranks say of themselves, and from that: who keeps the others waiting.

An `Activity` is set by the thread that does it. `Judge` is pure: signs and a clock in, the reason why the job ends out.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from types import FrameType

from dflop.errors import is_echo
from dflop.units import seconds

NUM_NAMED = 8
"""Ranks named where all wait."""
PLACE_AFTER_S = 5.0


class Mode(StrEnum):
    """What it means when an activity takes long."""

    WORKS = "works"
    """The thread itself is stuck."""
    WAITS = "waits"
    """Somebody else is, unless everybody waits."""
    MAY_LAST = "may last"
    """Nothing: models are loaded and files written as long as it takes."""


@dataclass(frozen=True, slots=True)
class Spell:
    """What one thread of a rank has been doing, and for how long."""

    what: str
    mode: str
    age_s: float
    place: str = ""
    """Line of code it is at, where it has been there for long."""

    def __str__(self) -> str:
        return f"{self.what}, for {seconds(self.age_s)}" + (f", at {self.place}" if self.place else "")


class Activity:
    """What one thread is doing. That thread sets it; any other may read `spell`."""

    def __init__(self) -> None:
        self.step = -1
        """Step that it is done for; -1: none yet."""
        self._thread_id = 0
        self._now = ("starts", Mode.MAY_LAST, time.monotonic())

    def works(self, what: str) -> None:
        """It computes or reads, alone."""
        self._begin(what, Mode.WORKS)

    def waits(self, what: str) -> None:
        """It waits for other ranks."""
        self._begin(what, Mode.WAITS)

    def may_last(self, what: str) -> None:
        """It does something that nobody can say the duration of."""
        self._begin(what, Mode.MAY_LAST)

    def spell(self) -> Spell:
        """What it has been doing, and for how long."""
        what, mode, since_s = self._now
        age_s = time.monotonic() - since_s
        return Spell(what, mode, age_s, _place(self._thread_id) if age_s > PLACE_AFTER_S else "")

    def _begin(self, what: str, mode: Mode) -> None:
        where = what if self.step < 0 else f"step {self.step}, {what}"
        self._thread_id = threading.get_ident()
        self._now = (where, mode, time.monotonic())


@dataclass(frozen=True, slots=True)
class Activities:
    """Activities of the two threads of a rank that other ranks wait for."""

    main: Activity = field(default_factory=Activity)
    """The one that computes."""
    feed: Activity = field(default_factory=Activity)
    """The one that prepares the step ahead."""
    _lost_peer: threading.Event = field(default_factory=threading.Event)

    @property
    def has_lost_peer(self) -> bool:
        """Whether any thread of the rank has seen a peer close its connection."""
        return self._lost_peer.is_set()

    def note(self, error: BaseException) -> bool:
        """Note an error of any thread of the rank at once; True where it only says that a peer closed its connection.

        The thread that computes may wait for its device then, and ask another thread for its result a step later.
        """
        cause: BaseException | None = error
        while cause is not None:
            if is_echo(str(cause)):
                self._lost_peer.set()
                return True
            cause = cause.__cause__
        return False


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank says of itself, again and again; ages in it differ each time."""

    main: Spell
    feed: Spell
    was_hung_up_on: bool = False
    """A peer broke off a connection: somebody has died."""

    def encode(self) -> str:
        """A list, not nested objects: rank 0 reads one of every rank each second."""
        return json.dumps([*astuple(self.main), *astuple(self.feed), self.was_hung_up_on])

    @classmethod
    def decode(cls, text: str | bytes) -> Sign:
        *spells, was_hung_up_on = json.loads(text)
        return cls(Spell(*spells[:4]), Spell(*spells[4:]), was_hung_up_on)


class Judge:
    """Receives heartbeats of every rank and decides which has failed.

    Args:
        labels: Per rank, how people call it.
        now_s: Monotonic, like all times here; from now on every rank should be heard.
        stall_s: How long a rank may be silent, and nothing in the job move.
        gone_s: How long a rank may be silent when peers say that somebody has died.
    """

    def __init__(self, labels: Sequence[str], now_s: float, *, stall_s: float, gone_s: float) -> None:
        self._labels, self._stall_s, self._gone_s = labels, stall_s, gone_s
        self._signs: dict[int, Sign] = {}
        self._heard_at_s = dict.fromkeys(range(len(labels)), now_s)

    def hear(self, rank: int, sign: Sign, now_s: float) -> None:
        """Take note of the newest sign of a rank, which may be one that is known already."""
        if self._signs.get(rank) != sign:
            self._signs[rank], self._heard_at_s[rank] = sign, now_s

    def verdict(self, now_s: float) -> str:
        """Who has failed, and how; empty while all is well, or nobody can know better yet."""
        limit_s = self._gone_s if any(s.was_hung_up_on for s in self._signs.values()) else self._stall_s
        silent = [rank for rank, at_s in self._heard_at_s.items() if now_s - at_s > limit_s]
        if silent:
            # The one that was heard least: others may have died of it.
            return self._gone(min(silent, key=lambda rank: self._heard_at_s[rank]))
        if len(self._signs) < len(self._labels) or not all(self._is_stuck(s.main) for s in self._signs.values()):
            return ""
        spells = [(rank, spell) for rank, sign in self._signs.items() for spell in (sign.main, sign.feed)]
        working = [(rank, spell) for rank, spell in spells if spell.mode == Mode.WORKS]
        if not working:
            return self._nobody_moves()
        rank, spell = max(working, key=lambda found: found[1].age_s)
        # All may wait for work that was begun a moment later than they began to wait.
        return f"{self._labels[rank]} is stuck: {spell}" if self._is_stuck(spell) else ""

    def _is_stuck(self, spell: Spell) -> bool:
        return spell.mode != Mode.MAY_LAST and spell.age_s > self._stall_s

    def _gone(self, rank: int) -> str:
        seen = f"last seen in {self._signs[rank].main.what}" if rank in self._signs else "never seen"
        why = "it was killed or stopped, or its node is gone"
        return f"{self._labels[rank]} sent no heartbeat: {why}; {seen}"

    def _nobody_moves(self) -> str:
        named = [f"{self._labels[rank]}: {sign.main}" for rank, sign in sorted(self._signs.items())[:NUM_NAMED]]
        return "\n".join(["all ranks wait for each other:", *named])


def _place(thread_id: int) -> str:
    """Innermost line of this package that a thread is at."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    while frame is not None and "dflop" not in frame.f_code.co_filename.split(os.sep):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
