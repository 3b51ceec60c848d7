"""Reads the ends of logs, and follows those of running jobs without drowning their reader: ranks may write MB a second.

Whole lines only. Each read of a running job passes on at most `MAX_READ_BYTES`; when the file has run further ahead,
the middle is skipped, with a line that says how much. The traceback that ends a task is left out, up to the next start
of the job: the error of the job reports it, where it is the cause and no error of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dflop import units
from dflop.launch.job import JobHandle, JobState, JobStatus, log_paths
from dflop.launch.payload import START_LINE
from dflop.launch.results import BATCH_LOG

BLOCK_BYTES = 64 * 1024
MAX_READ_BYTES, MAX_LINE_CHARS = 16 * 1024, 500
MAX_TAILED = 8
"""Jobs whose logs are followed at the same time; of a large array nobody reads more."""
_NOISE = "submitit INFO ("
_RAISED = re.compile(r"submitit ERROR \(.*\) - Submitted job triggered an exception$")


class JobTails:
    """Follows rank 0 and the batch script of the first few jobs that run; each that ends makes room for another."""

    def __init__(self, on_line: Callable[[JobHandle, str], None]) -> None:
        self._on_line = on_line
        self._tails: dict[JobHandle, list[LogTail]] = {}

    def read(self, statuses: Sequence[tuple[JobHandle, JobStatus]]) -> None:
        """Pass on what is new."""
        for handle, (state, _) in statuses:
            has_room = len(self._tails) < MAX_TAILED or state.is_final
            if handle in self._tails or (has_room and state is not JobState.QUEUED):
                paths = (*log_paths(handle), handle.path(BATCH_LOG))
                for tail in self._tails.setdefault(handle, [LogTail(path) for path in paths]):
                    for line in tail.read(is_last=state.is_final):
                        self._on_line(handle, line)
            if state.is_final:
                self._tails.pop(handle, None)


class LogTail:
    """New lines of one file since the last read, as `JobTails` passes them on; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset_bytes = 0
        self._is_trace = False

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Complete lines written since the last call; with `is_last` an unfinished last line too."""
        text, self.offset_bytes, skipped = new_lines(self.path, self.offset_bytes, MAX_READ_BYTES, is_last=is_last)
        if skipped:
            self._is_trace = False
            yield f"[{units.num_bytes(skipped)} skipped; all of it is in {self.path}]"
        for line in text.splitlines():
            is_ours = line.startswith(_NOISE)
            self._is_trace = _RAISED.match(line) is not None or (
                self._is_trace and not is_ours and not line.startswith(START_LINE)
            )
            if not self._is_trace and not is_ours:
                yield line[:MAX_LINE_CHARS]


def new_lines(path: Path, offset_bytes: int, most_bytes: int = 0, *, is_last: bool = False) -> tuple[str, int, int]:
    """(lines that were finished since, where to go on, bytes skipped to have at most so many, which 0 does not limit).

    From the beginning where the file was cut. Nothing where it cannot be read just now: it is not there yet, or its
    server has moved it (a stale handle).
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            start = offset_bytes if offset_bytes <= size else 0
            skipped = max(0, size - start - most_bytes) if most_bytes else 0
            file.seek(start + skipped)
            chunk = file.read(most_bytes or -1)
    except OSError:
        return "", offset_bytes, 0
    if skipped:
        cut = chunk.find(b"\n") + 1
        skipped, chunk = skipped + cut, chunk[cut:]
    if not is_last:
        chunk = chunk[: chunk.rfind(b"\n") + 1]
    return chunk.decode(errors="replace"), start + skipped + len(chunk), skipped


def last_lines(path: Path, num_lines: int) -> tuple[str, int]:
    """(the last lines of a file, the offset for `new_lines`); `new_lines` returns an unfinished line once it ends."""
    most_bytes = BLOCK_BYTES
    while True:
        text, offset_bytes, skipped = new_lines(path, 0, most_bytes)
        lines = text.splitlines(keepends=True)
        if not skipped or len(lines) >= num_lines:
            return "".join(lines[max(0, len(lines) - num_lines) :]), offset_bytes
        most_bytes *= 4
