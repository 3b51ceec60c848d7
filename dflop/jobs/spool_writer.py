"""Spool writes off the training path that outlast a full disk.

Rows that cannot be written stay in memory and are tried again; that is said once, and so is that it is over. Whoever
reads a job's log shall know that rows are late, and not be told every few steps.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from dflop.errors import StoreError
from dflop.run.messages import say
from dflop.store.spool import SpoolWriter

FLUSH_EVERY_S = 20.0


class SpoolThread:
    """Appends records, called `what`, in the background; a full or failing disk never stops who hands them over."""

    def __init__(self, writer: SpoolWriter, what: str = "observations") -> None:
        self._writer, self._what = writer, what
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def put(self, record: Any) -> None:
        """Hand over a record; returns at once."""
        self._queue.put(record)

    def flush(self) -> None:
        """Wait until everything that was handed over is on disk, or could not be written."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Write everything that was handed over and end the thread; it logs what it could not write."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        record: Any = ()
        is_failing = False
        while record is not None:
            try:
                record = self._queue.get(timeout=FLUSH_EVERY_S)
            except queue.Empty:
                record = threading.Event()  # a flush that nobody waits for
            is_row = record is not None and not isinstance(record, threading.Event)
            try:
                if is_row:
                    self._writer.append(record)
                else:
                    self._writer.flush()
            except StoreError as error:
                if record is None:
                    say(f"{self._what} are lost: {error}")
                elif not is_failing:
                    say(f"{self._what} cannot be written, training continues and retries: {error}")
                is_failing = True
            else:
                if is_failing and not is_row:
                    is_failing = False
                    say(f"{self._what} are being written again, none was lost")
            if isinstance(record, threading.Event):
                record.set()
