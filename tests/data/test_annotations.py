import os
import stat

import pytest

from dflop.data.annotations import BadSample, Turn, confine


def test_paths_stay_under_the_media_root(tmp_path):
    root, outside = tmp_path / "media", tmp_path / "outside"
    for folder in (root / "sub", outside, tmp_path / "media2"):
        folder.mkdir(parents=True)
    (outside / "x.png").touch()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "sub")
    (root / "loop").symlink_to(root / "loop")
    assert confine(root, "sub/../a.png") == root.resolve() / "a.png"
    assert confine(root, "inner/a.png") == root / "inner" / "a.png"
    assert confine(root, "loop").name == "loop"
    assert confine(root, "link/x.png").samefile(outside / "x.png")
    (tmp_path / "other").symlink_to(root / "sub")  # its parent is the root: links of the root's own name come first
    assert confine(tmp_path / "other" / "..", "a.png") == root / "a.png"
    (tmp_path / "alias2").symlink_to(root)
    assert confine(tmp_path / "alias2", f"{tmp_path}/alias2/link/x.png").samefile(outside / "x.png")
    assert confine(root, f"{root}/sub/a.png") == confine(root / "inner", f"{root}/sub/a.png") == root / "sub/a.png"
    (tmp_path / "alias").symlink_to(root)
    assert confine(root, f"{tmp_path}/alias/a.png") == root.resolve() / "a.png"
    outer = ("/etc/hostname", f"{outside}/x.png", f"{root}/../outside/x.png", "link/../../outside/x.png",
             "../outside/x.png", "../media2/x.png", "..", "/")  # fmt: skip
    for path, reason in {**dict.fromkeys(outer, "leaves"), "a\0b": "invalid media path"}.items():
        with pytest.raises(BadSample, match=reason):
            confine(root, path)


def test_links_of_the_dataset_are_followed_but_not_those_of_others_to_files_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/rev/images").mkdir(parents=True)
    (tmp_path / "blobs" / "c0ffee").write_text("x")
    root = tmp_path / "snapshots" / "rev"
    (root / "images" / "a.jpg").symlink_to("../../../blobs/c0ffee")
    (tmp_path / "disk").symlink_to(tmp_path / "blobs")
    (root / "more").symlink_to(tmp_path / "disk")
    assert confine(root, "images/a.jpg").read_text() == confine(root, "more/c0ffee").read_text() == "x"
    for name in ("../../blobs/c0ffee", "images/../../../blobs/c0ffee", "more/../../../blobs/c0ffee"):
        with pytest.raises(BadSample, match="leaves the media root"):
            confine(root, name)
    lstat = os.lstat

    def of_another(path: str) -> os.stat_result:
        status = lstat(path)
        return os.stat_result((*status[:4], 4242, *status[5:])) if stat.S_ISLNK(status.st_mode) else status

    monkeypatch.setattr(os, "lstat", of_another)
    for name in ("images/a.jpg", "more/c0ffee"):
        with pytest.raises(BadSample, match=r"another user \(uid 4242\) leads to a file of yours"):
            confine(root, name)
    (tmp_path / "blobs" / "c0ffee").unlink()
    assert not confine(root, "images/a.jpg").exists(), "the reader says that it is missing"


def test_a_turn_is_cut_at_its_placeholders_and_at_nothing_that_looks_like_one():
    text = "<image> is <image>, <video>"
    assert Turn("user", text).pieces() == ["", "image", " is ", "image", ", ", "video", ""]
    assert Turn("user", text, literal=(11,)).pieces() == ["", "image", " is <image>, ", "video", ""]
    assert Turn("assistant", text).pieces() == Turn("system", text).pieces() == [text]
