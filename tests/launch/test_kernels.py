import os
import stat
import tempfile
from pathlib import Path

import pytest

from dflop.launch.kernels import kernel_environment


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_kernels_are_kept_in_a_folder_of_ones_own(temporary):
    folder = kernel_environment({})["NUMBA_CACHE_DIR"]
    assert folder.startswith(str(temporary))
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert kernel_environment({}) == {"NUMBA_CACHE_DIR": folder}, "the next start finds them there"


def test_other_sources_have_another_folder(temporary, monkeypatch):
    folder = kernel_environment({})["NUMBA_CACHE_DIR"]
    monkeypatch.setattr("dflop.launch.kernels.ROOMS", ("simulate",))
    assert kernel_environment({})["NUMBA_CACHE_DIR"] != folder


def test_the_users_choice_stands(temporary):
    assert kernel_environment({"NUMBA_CACHE_DIR": "/scratch"}) == {}
    assert list(temporary.iterdir()) == []


def become_a_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    "spoil", [*(lambda folder, mode=mode: folder.chmod(mode) for mode in (0o770, 0o707, 0o777)), become_a_link]
)
def test_a_folder_that_others_can_write_to_or_a_link_to_somewhere_else_is_not_used(spoil):
    spoil(Path(kernel_environment({})["NUMBA_CACHE_DIR"]))
    assert kernel_environment({}) == {}


def test_a_folder_of_somebody_else_is_not_used(monkeypatch):
    kernel_environment({})
    uid = os.getuid()
    real = os.lstat

    class NotOurs:
        def __init__(self, found):
            self.st_mode, self.st_uid = found.st_mode, uid + 1

    monkeypatch.setattr("pathlib.Path.lstat", lambda self: NotOurs(real(self)))
    assert kernel_environment({}) == {}


def test_no_room_for_the_folder_is_no_error(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    assert kernel_environment({}) == {}
