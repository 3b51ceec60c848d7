"""Errors a user can act on: what happened (with values), where, what to do next, and the exit code.

`dflop/cli` prints exactly these three lines and exits with `exit_code`; anything else is a bug and shows a traceback.
Values come from file names, datasets and other programs: no error shows a secret or a terminal's control characters.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import PurePath

_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255
"""Limits of Linux and of nearly every file system."""

_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}
_HUNG_UP = re.compile(
    r"connection (closed|reset|refused|aborted|was likely closed)|broken pipe|socket (timeout|closed)|pair closure|"
    r"ncclRemoteError|remote process exited|timed out waiting|connectFullMesh",
    re.IGNORECASE,
)

# Controls of C0 (but tab and line feed) and C1, what turns or ends a line in Unicode, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HIDDEN = "***"
_SECRET_NAME = r"(?:password|passwd|passphrase|secret|api_?key|access_?key|auth_?string|credentials?)"
_NAMES_SECRET = re.compile(rf"(?i:{_SECRET_NAME})|_TOKEN$|^TOKEN$|^SLURM_JWT$")
_SECRETS = (
    re.compile(r"(?P<kept>\b[a-zA-Z][\w+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"),  # of a user, in an address
    re.compile(r"(?P<kept>(?i:\bauthorization: ?\w+ )|\bBearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(
        r"(?P<kept>(?<![A-Za-z0-9])(?:"
        rf"[A-Za-z0-9_]*(?i:{_SECRET_NAME})[A-Za-z0-9_]*|[A-Z0-9_]*_TOKEN|TOKEN|SLURM_JWT"
        r")(?:\s?=\s?|: ))(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"|&;<>()]+)"
    ),
    re.compile(r"(?P<kept>--(?:password|token|api-key|secret)[= ])[^\s'\"]+"),
    re.compile(r"(?P<kept>\b)(?:hf_|ghp_|github_pat_|pnu_|pnb_|sk-|AKIA)[A-Za-z0-9_-]{16,}"),
)
"""Addresses with a password, headers, assignments, options, and keys that are known by their beginning."""


def printable(text: str) -> str:
    """Text whose control characters are written as escapes: it cannot move a cursor, turn a line or hide a part."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def names_secret(name: str) -> bool:
    """Whether a variable or key of this name holds something that is not to be shown."""
    return _NAMES_SECRET.search(name) is not None


def redacted(text: str) -> str:
    """Text in which what looks like a password, token or key is `***`. It errs: no secret should rely on it."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return text


class DflopError(Exception):
    """Base of every error dflop raises on purpose.

    Args:
        what: What happened, with the offending values.
        where: File and key, job id, run directory or table.
        hint: The next thing to do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = (printable(redacted(text)) for text in (what, where, hint))
        super().__init__(self.what)

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


class PayloadError(LaunchError):
    """What a job ran has failed by itself: data, costs or training. The message is its own."""

    exit_code = 1


class InfrastructureError(LaunchError):
    """The machine failed the job (node lost, preempted): the same job submitted again may well succeed."""


class DataError(DflopError):
    """The dataset cannot be used (not: a single bad sample, which becomes a quarantine row)."""


class CostError(DflopError):
    """The cost of a module cannot be predicted: no table for it, or probes that do not determine one."""


class TrainError(DflopError):
    """Training stopped; the message names rank, stage and microbatch."""


class Interrupted(DflopError):
    """A job stopped on request; its progress is on disk, and the same job resumes from there."""

    exit_code = 75


class Cancelled(DflopError):
    """Somebody cancelled the run; everything it had reached is on disk."""


class Stopped(Cancelled):
    """A signal ended the driver of a run, which has cancelled its jobs."""


def of_disk(error: OSError) -> LaunchError | None:
    """An error of ours where a disk is full, read-only or failing; None where it may be a fault of ours."""
    if error.errno not in _DISK_ERRNOS:
        return None
    return LaunchError(
        f"disk error: {error.strerror}",
        where=str(error.filename or ""),
        hint="fix that (if full, free space), then start again: finished work is kept",
    )


def is_echo(text: str) -> bool:
    """Whether an error only says that somebody else hung up or never answered (gloo, NCCL, sockets)."""
    return _HUNG_UP.search(text) is not None


def path_problem(path: PurePath) -> str:
    """Why no file can have this path; empty where one can. A pattern may be longer than a name."""
    text = str(path)
    if "\0" in text or len(text.splitlines()) > 1:
        return "a path must be one line without null characters"
    names = [part for part in path.parts if not any(c in part for c in "{*?[")]
    if len(os.fsencode(text)) > _MAX_PATH_BYTES or any(len(os.fsencode(name)) > _MAX_NAME_BYTES for name in names):
        return f"file name too long: {_MAX_NAME_BYTES} bytes are the most, {_MAX_PATH_BYTES} with all folders"
    return ""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Hint that lists the valid words and, when one is close, suggests it."""
    choices = sorted(valid)
    close = difflib.get_close_matches(word, choices, n=1)
    suggestion = f"did you mean `{close[0]}`? " if close else ""
    return f"{suggestion}valid: {', '.join(choices)}"
