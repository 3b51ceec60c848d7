"""Errors a user can act on: what happened (with values), where, what to do next, and the exit code.

`cli.py` prints exactly these three lines and exits with `exit_code`; anything else is a bug and shows a traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_HUNG_UP = re.compile(
    r"connection (closed|reset|refused|aborted|was likely closed)|broken pipe|socket (timeout|closed)|pair closure|"
    r"ncclRemoteError|remote process exited|timed out waiting|connectFullMesh",
    re.IGNORECASE,
)


class DflopError(Exception):
    """Base of every error dflop raises on purpose.

    Args:
        what: What happened, with the offending values.
        where: File and key, job id, run directory or table.
        hint: The next thing to do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.hint:
            parts.append(f"  hint:  {self.hint}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Job results cross process borders pickled; the default would drop the keyword arguments.
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _rebuild(cls: type[DflopError], what: str, where: str, hint: str) -> DflopError:
    return cls(what, where=where, hint=hint)


class ConfigError(DflopError):
    """The configuration or the command line is wrong."""

    exit_code = 2


class InfeasiblePlanError(DflopError):
    """No layout satisfies the limits; the message names the binding one."""

    exit_code = 3


class StoreError(DflopError):
    """The profile store is locked, corrupt or of another version."""

    exit_code = 4


class LaunchError(DflopError):
    """A job could not be submitted, or died of something other than its own payload."""

    exit_code = 5


class InfrastructureError(LaunchError):
    """The machine failed the job (node lost, preempted): the same job submitted again may well succeed."""


class DataError(DflopError):
    """The dataset cannot be used (not: a single bad sample, which becomes a quarantine row)."""


class CostError(DflopError):
    """The cost of a module cannot be predicted: no table for it, or probes that do not determine one."""


class TrainError(DflopError):
    """Training stopped; the message names rank, stage and microbatch."""


class Interrupted(DflopError):
    """A job was told to stop and did; everything it had reached is on disk, and started again it goes on from there."""

    exit_code = 75


class Cancelled(DflopError):
    """Somebody cancelled the run; everything it had reached is on disk."""


def is_echo(text: str) -> bool:
    """Whether an error only says that somebody else hung up or never answered (gloo, NCCL, sockets)."""
    return _HUNG_UP.search(text) is not None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Hint that lists the valid words and, when one is close, suggests it."""
    choices = sorted(valid)
    close = difflib.get_close_matches(word, choices, n=1)
    suggestion = f"did you mean `{close[0]}`? " if close else ""
    return f"{suggestion}valid: {', '.join(choices)}"
