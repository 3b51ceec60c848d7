"""A folder's file system: what works here, and what is said where it does not."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dflop.doctor import file_system as file_system_module
from dflop.doctor.file_system import file_system
from dflop.doctor.finding import FAIL, OK, WARN, Finding


def of(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in file_system("store", folder)}


def test_everything_works_here_and_nothing_is_left(tmp_path):
    found = of(tmp_path / "not" / "yet")
    assert [f.status for name, f in found.items() if name != "store"] == [OK] * 3
    assert list(tmp_path.iterdir()) == []


def refuse(*_args: object, **_options: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("module", "name", "double", "finding", "status", "words"),
    [
        (fcntl, "flock", refuse, "store: locks", FAIL, "No locks available"),
        (fcntl, "flock", lambda *_: None, "store: locks", FAIL, "two processes got the same lock"),
        (os, "link", lambda a, b: os.path.exists(b) or Path(b).write_text("b"), "store: link", FAIL, ""),
        (file_system_module.tempfile, "TemporaryDirectory", refuse, "store: writing", FAIL, "No locks available"),
        (file_system_module, "MIN_FREE_BYTES", 1 << 60, "store", WARN, ""),
    ],
    ids=["no locks", "locks for everybody", "links that overwrite", "not writable", "nearly full"],
)
def test_what_does_not_work_is_named(tmp_path, monkeypatch, module, name, double, finding, status, words):
    monkeypatch.setattr(module, name, double)
    found = of(tmp_path)[finding]
    assert found.status == status
    assert words in found.detail
    assert found.advice
