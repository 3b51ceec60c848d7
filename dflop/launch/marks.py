"""What a task leaves for its batch script to find: that it was stopped, and how far it is.

A job that was told to stop and did leaves a line, so that its batch script knows that it may start again.
srun's exit code does not tell: it is 137 where one rank leaves some milliseconds after another. So rank 0 writes where
the job began and where it is once that is on disk. A job that is stopped three times in a row before it got anywhere
is not started a fourth time.
"""

from __future__ import annotations

import os

STOPS_VARIABLE = "DFLOP_STOPS"
"""Names the file that lines are appended to; set by batch scripts, and by nobody else."""
NUM_CHANCES = 3
"""Starts in a row that may be stopped before they get anywhere."""
START_LINE = "dflop: start "
"""Begins a line that parts one start of a job from the next, in its batch log and in its tasks' logs."""


def note_stop(began_at: int, reached: int) -> None:
    """Leave the line, if somebody wants it: `began_at reached`, in whatever units the job counts its progress.

    Call it on one rank, when what was reached is on disk, before any rank ends.
    """
    path = os.environ.get(STOPS_VARIABLE)
    if path:
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{began_at} {reached}\n")
            file.flush()
            os.fsync(file.fileno())
