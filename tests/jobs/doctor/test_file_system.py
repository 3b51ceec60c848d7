"""A folder's file system: what works here, and what is said where it does not."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dflop.jobs.doctor import file_system as module
from dflop.jobs.doctor.file_system import file_system, mount_kind
from dflop.jobs.doctor.findings import FAIL, OK, WARN, Finding

MOUNTS = """\
proc /proc proc rw 0 0
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
mds:/scratch /home/scratch lustre rw,flock 0 0
/dev/sdb1 /data\\040two xfs rw 0 0
"""


def of(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in file_system("store", folder)}


def test_everything_works_here_and_nothing_is_left(tmp_path):
    found = of(tmp_path / "not" / "yet")
    assert [f.status for name, f in found.items() if name != "store"] == [OK] * 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/home/me", "nfs4"), ("/home/scratch/x", "lustre"), ("/homes", "ext4"), ("/data two/a", "xfs")],
)
def test_the_kind_is_that_of_the_nearest_mount(folder, kind):
    assert mount_kind(Path(folder), MOUNTS) == kind


def refuse(*_args: object, **_options: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("lock", "words"), [(refuse, "No locks available"), (lambda *_: None, "two holders got the same lock")]
)
def test_a_mount_without_locks_or_with_locks_for_everybody(tmp_path, monkeypatch, lock, words):
    monkeypatch.setattr(fcntl, "flock", lock)
    finding = of(tmp_path)["store: locks"]
    assert finding.status == FAIL
    assert words in finding.detail
    assert finding.advice


def test_links_that_overwrite(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda a, b: os.path.exists(b) or Path(b).write_text("b"))
    assert of(tmp_path)["store: link"].status == FAIL


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", refuse)
    finding = of(tmp_path)["store: writing"]
    assert finding.status == FAIL
    assert "No locks available" in finding.detail


def test_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 1 << 60)
    assert of(tmp_path)["store"].status == WARN
