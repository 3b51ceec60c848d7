"""Whose a run or a file is, in words."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket


def user_name(uid: int) -> str:
    """Name of a user, or `uid123` of one that this machine does not know."""
    with contextlib.suppress(KeyError, OverflowError):
        return pwd.getpwuid(uid).pw_name
    return f"uid{uid}"


def this_user() -> str:
    """Who begins runs in this process, as runs record it: `user@host`."""
    return f"{user_name(os.geteuid())}@{socket.gethostname()}"
