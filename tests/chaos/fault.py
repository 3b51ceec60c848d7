"""What a fault is: when it strikes, what it does, and how the command may end because of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.play import Play

PARTS = ("store", "data", "engine", "slurm")
Deed = Callable[[Play], None]


@dataclass(frozen=True)
class End:
    """A way in which the command may end because of a fault, and what an operator does then.

    Whatever it is, the same command is issued again.
    """

    code: int
    """Exit code; of a process that was killed minus the signal."""
    says: str = ""
    """Part of what it said."""
    mend: Deed | None = None
    """What the message, or docs/operating.md, says to do; None: nothing but to start again."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong in a run."""

    name: str
    part: str
    when: str
    """Name of a moment in `moments.py`."""
    strike: Deed
    ends: tuple[End, ...] = ()
    """How it may end the command; a fault without any is survived by the command that it strikes."""
    is_between: bool = False
    """Strikes between two commands: the first one is interrupted by Ctrl-C when the moment has come."""
    prepare: Deed | None = None
    """Done to the stage before anything starts."""
    excludes: str = ""
    """Of the faults with the same word here, a run has one."""
    dies_at: str = ""
    """Function before or behind which the first command kills itself, as `dying.py` takes it."""


class NothingToStrike(Exception):
    """What a fault is aimed at is not there."""
