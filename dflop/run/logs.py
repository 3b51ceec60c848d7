"""The end of a log file, and what is added to it: whole lines, however large the file is."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

BLOCK_BYTES = 64 * 1024
STEP_LINE = re.compile(r"step (\d+)/(\d+)\b")
"""What a training job says of each step."""
MAX_LINES = 1000
"""Among which the last step is looked for."""


def last_lines(path: Path, num_lines: int) -> tuple[str, int]:
    """(the last lines of a file, where `new_lines` goes on); a line that is not finished is left to that."""
    try:
        with path.open("rb") as file:
            start, content = file.seek(0, 2), b""
            while start and content.count(b"\n") <= num_lines:
                step = min(BLOCK_BYTES, start)
                start -= step
                file.seek(start)
                content = file.read(step) + content
    except FileNotFoundError:
        return "", 0
    whole = content[: content.rfind(b"\n") + 1]
    shown = whole.splitlines()[-num_lines:] if num_lines > 0 else []
    return b"\n".join(shown).decode(errors="replace"), start + len(whole)


def new_lines(path: Path, offset_bytes: int) -> tuple[str, int]:
    """(lines that were finished since, where to go on); from the beginning where the file was cut."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < offset_bytes:
                offset_bytes = 0
            file.seek(offset_bytes)
            content = file.read()
    except FileNotFoundError:
        return "", offset_bytes
    whole = content[: content.rfind(b"\n") + 1]
    return whole.rstrip(b"\n").decode(errors="replace"), offset_bytes + len(whole)


def step_logged(log: Path) -> int:
    """Step that the end of a training job's log tells of; 0 where it tells of none."""
    text = ""
    with contextlib.suppress(OSError):
        text, _ = last_lines(log, MAX_LINES)
    found = [int(match[1]) for line in text.splitlines() if (match := STEP_LINE.match(line))]
    return found[-1] if found else 0
