"""Spool writes off the training path: a thread owns the writer, the loop only puts records in a queue."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

from dflop.errors import StoreError
from dflop.store.spool import SpoolWriter

FLUSH_EVERY_S = 20.0
WRITTEN_AGAIN = "observations are written again, none was lost"


class SpoolThread:
    """Appends records in the background; a full or failing disk never stops training.

    That rows cannot be written is said once, and that they are again, too.

    Args:
        writer: Used by the thread alone from now on.
    """

    def __init__(self, writer: SpoolWriter) -> None:
        self._writer = writer
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_failed = False
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
        """Write everything that was handed over and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                record = self._queue.get(timeout=FLUSH_EVERY_S)
            except queue.Empty:
                self._try(self._writer.flush)
                continue
            if record is None:
                had_failed, self._has_failed = (
                    self._has_failed,
                    False,
                )  # the last chance: what is lost now is said again
                self._try(self._writer.flush)
                if had_failed and not self._has_failed:
                    _say(WRITTEN_AGAIN)
                return
            if isinstance(record, threading.Event):
                self._try(self._writer.flush)
                record.set()
            else:
                self._try(self._writer.append, record)

    def _try(self, write: Any, *args: Any) -> None:
        try:
            write(*args)
        except StoreError as error:
            # Rows stay in the writer's buffer and are tried again with the next flush.
            if not self._has_failed:
                _say(f"observations cannot be written, training goes on: {error}")
            self._has_failed = True
            return
        # A row that went into the buffer says nothing about the disk.
        if self._has_failed and not self._writer.num_buffered:
            self._has_failed = False
            _say(WRITTEN_AGAIN)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
