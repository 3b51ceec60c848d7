from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dflop.errors import StoreError
from dflop.store import lock


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        lock.exclusive(path, timeout_s=0),
        pytest.raises(StoreError, match=rf"pid {os.getpid()} on .* since 20"),
        lock.exclusive(path, timeout_s=0),
    ):
        pass
    with lock.exclusive(path, timeout_s=0):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(_fd: int, _flags: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock.fcntl, "flock", fail)
    with pytest.raises(StoreError, match="cannot lock files"), lock.exclusive(tmp_path / "lock", timeout_s=0):
        pass
