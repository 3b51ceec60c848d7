"""Several users of one machine, for tests that run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

TEAM, ALICE, BOB, EVE = 60_000, 60_001, 60_002, 60_003
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which root may")


@contextmanager
def act(user: int, umask: int = 0o022) -> Iterator[None]:
    """The block is run by another user, who is in the team unless it is Eve."""
    before = os.umask(umask)
    groups = os.getgroups()
    os.setgroups([] if user == EVE else [TEAM])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)
