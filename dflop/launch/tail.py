"""Follows the log of a running job without drowning its reader.

A rank that logs in a loop writes megabytes a second; a log page keeps lines. Each read passes on at most
`MAX_READ_BYTES`, whole lines only; when the file has run further ahead, the middle is skipped and the skip is said.
The traceback that ends a task is left out, up to the next start of the job: whoever collects its result tells it where
it is the cause and no error of ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dflop import units
from dflop.launch.marks import START_LINE

MAX_READ_BYTES = 16 * 1024
MAX_LINE_CHARS = 500
_NOISE = "submitit INFO ("
_RAISED = re.compile(r"submitit ERROR \(.*\) - Submitted job triggered an exception$")


class LogTail:
    """New lines of one file since the last read; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset_bytes = 0
        self._is_trace = False

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Complete lines written since the last call; with `is_last` an unfinished last line too.

        None where the file cannot be read just now: it is not there yet, or its server has moved it (a stale handle).
        """
        try:
            with open(self.path, "rb") as file:
                behind = os.fstat(file.fileno()).st_size - self.offset_bytes
                skipped = max(0, behind - MAX_READ_BYTES)
                file.seek(self.offset_bytes + skipped)
                chunk = file.read(MAX_READ_BYTES)
        except OSError:
            return
        if skipped:
            cut = chunk.find(b"\n") + 1
            skipped, chunk = skipped + cut, chunk[cut:]
            self._is_trace = False
            yield f"[{units.num_bytes(skipped)} skipped; all of it is in {self.path}]"
        if not is_last:
            chunk = chunk[: chunk.rfind(b"\n") + 1]
        self.offset_bytes += skipped + len(chunk)
        for line in chunk.decode(errors="replace").splitlines():
            is_ours = line.startswith(_NOISE)
            self._is_trace = _RAISED.match(line) is not None or (
                self._is_trace and not is_ours and not line.startswith(START_LINE)
            )
            if not self._is_trace and not is_ours:
                yield line[:MAX_LINE_CHARS]
