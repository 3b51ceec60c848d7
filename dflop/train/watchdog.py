"""Why a job ends, known to every rank within seconds.

    alive/<rank>   its newest `Sign`
    failed         why the job ends; the first writer wins, everybody prints it and ends
    heard/<rank>   it has

A rank that raises says so. One that was killed or stopped falls silent, one that is stuck is seen to be, and rank 0
judges both (`liveness.py`). Peers of a dead rank raise, too, and first: what they raise is an echo, which only makes
rank 0 look closer. When rank 0 dies, who serves these keys, all others lose their connection, or get no answer.

All of this is done by two threads per rank, with a connection of their own: one talks, and may get stuck in that; the
other ends the process when it is. The thread that trains may hang in a collective for as long as it likes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from dflop.errors import DflopError
from dflop.train.liveness import Activities, Judge, Sign
from dflop.train.signals import leave
from dflop.train.wire import Store, noted, open_store

BEAT_S = 1.0
GONE_S = 4.0
"""Silence of a rank that means death when its peers lost connections."""
ECHO_S = GONE_S + 4 * BEAT_S
"""How long a rank that only lost a connection waits for the reason."""
TELL_S = 3 * BEAT_S
"""How long rank 0 stays to let others read why the job ends."""
EXIT_S = 8.0
"""How long a rank that failed may take to leave by itself, results and records written."""
END_S = 2.0
"""How long what must be written may take in a process that is ended."""
NUM_TRACE_LINES = 20


class Watch:
    """Watches one rank, and on rank 0 all of them.

    Args:
        store: The key-value store, to which one more connection is opened.
        rank: This rank.
        labels: Per rank, how people call it.
        activities: What this rank's threads say they do.
        stall_s: How long a rank may be silent, and nothing in the job move.
        on_end: Writes what must not be lost, when the process is ended; any thread may call it.
    """

    def __init__(
        self, store: Store, rank: int, labels: Sequence[str], activities: Activities, *, stall_s: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._store = open_store(store.host, store.port, is_server=False, timeout_s=stall_s)
        self._rank, self._labels, self._activities = rank, labels, activities
        self._stall_s, self._on_end = stall_s, on_end
        self._judge: Judge | None = None
        if rank == 0:
            self._judge = Judge(labels, time.monotonic(), stall_s=stall_s, gone_s=min(GONE_S, stall_s))
        self._heard: dict[int, bytes] = {}
        """On rank 0, the newest sign of each rank that has given one, as it came."""
        self._own = ""
        """Why this rank has failed."""
        self._leave_at_s = float("inf")
        self._num_quiet_beats = 0
        self._closed, self._wake, self._told = threading.Event(), threading.Event(), threading.Event()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=f"watch-{work.__name__.strip('_')}", daemon=True)
            for work in (self._talk, self._guard)
        ]

    def start(self) -> None:
        """Watch from now on."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """All has gone well: watch no more. Every rank must have done so before rank 0 leaves."""
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(END_S)

    def report(self, error: BaseException) -> None:
        """Tell everybody why the job ends. Returns when they know; the process must end then, and is made to.

        If it is known already that another rank was first, or that is found out now, this ends the process.
        """
        if self._activities.note(error):
            self._wake.set()
            self._told.wait(ECHO_S)
        self._leave_at_s = time.monotonic() + EXIT_S
        self._own = self._describe(error)
        self._wake.set()
        self._told.wait(TELL_S + BEAT_S)

    def _talk(self) -> None:
        try:
            while not (self._closed.is_set() or self._told.is_set()):
                self._round()
                self._num_quiet_beats = 0
                self._wake.wait(BEAT_S)
                self._wake.clear()
        except RuntimeError:  # of torch, for every way in which a connection breaks
            if not self._closed.is_set():
                self._end(f"{self._labels[0]}, which hosts the job's key-value store, exited")

    def _round(self) -> None:
        sign = Sign(self._activities.main.spell(), self._activities.feed.spell(), self._activities.has_lost_peer)
        self._store.set(_alive(self._rank), sign.encode())
        if failure := self._own or self._judged():
            self._store.compare_set("failed", "", json.dumps(failure))
        if first := noted(self._store, "failed", ""):
            self._hear(first)

    def _judged(self) -> str:
        if self._judge is None:
            return ""
        missing = [rank for rank in range(len(self._labels)) if rank not in self._heard]
        is_complete = not missing or self._store.check([_alive(rank) for rank in missing])
        self._heard |= {rank: b"" for rank in missing if is_complete or self._store.check([_alive(rank)])}
        now_s, texts = time.monotonic(), self._store.multi_get([_alive(rank) for rank in self._heard])
        for rank, text in zip(self._heard, texts, strict=True):
            if text != self._heard[rank]:
                self._heard[rank] = text
                self._judge.hear(rank, Sign.decode(text), now_s)
        return self._judge.verdict(time.monotonic())

    def _hear(self, failure: str) -> None:
        self._store.set(f"heard/{self._rank}", "")
        if self._rank == 0:
            keys = [f"heard/{rank}" for rank in range(len(self._labels))]
            deadline_s = time.monotonic() + TELL_S
            while not self._store.check(keys) and time.monotonic() < deadline_s:
                time.sleep(BEAT_S / 20)
        if failure == self._own:
            self._told.set()
        else:
            self._end(failure)

    def _guard(self) -> None:
        while not self._closed.wait(BEAT_S):
            # Beats, not a clock: a process that was stopped and goes on must not think that it is the others who were.
            self._num_quiet_beats += 1
            if not self._own and self._num_quiet_beats * BEAT_S > self._stall_s:
                silence = f"has not responded for {self._stall_s:g} s"
                self._end(f"{self._labels[0]}, which hosts the job's key-value store, {silence}")
            if time.monotonic() > self._leave_at_s:
                self._end("")

    def _end(self, why: str) -> None:
        """End this process, whatever its threads are doing."""
        if not self._ending.acquire(blocking=False):
            return
        if why:
            here = f"{self._labels[self._rank]}, then: {self._activities.main.spell().what}"
            print(f"the job ends: {why}\n  ({here})", file=sys.stderr, flush=True)
        last = threading.Thread(target=self._on_end, daemon=True)
        last.start()
        last.join(END_S)
        leave(1)

    def _describe(self, error: BaseException) -> str:
        what = str(error) if isinstance(error, DflopError) else f"{type(error).__name__}: {error}"
        lines = [f"{self._labels[self._rank]} failed in {self._activities.main.spell().what}: {what}"]
        if not isinstance(error, DflopError):
            trace = "".join(traceback.format_exception(error)).rstrip().splitlines()
            lines += [f"  | {line}" for line in trace[-NUM_TRACE_LINES:]]
        return "\n".join(lines)


def _alive(rank: int) -> str:
    return f"alive/{rank}"
