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
    assert confine(root, "inner/a.png") == root.resolve() / "sub" / "a.png"
    assert confine(root, "loop").name == "loop"
    assert confine(root, f"{root}/sub/a.png") == confine(root / "inner", f"{root}/inner/a.png")
    (tmp_path / "alias").symlink_to(root)
    assert confine(root, f"{tmp_path}/alias/a.png") == root.resolve() / "a.png"
    outer = ("/etc/hostname", f"{outside}/x.png", f"{root}/link/x.png", f"{root}/../outside/x.png",
             "../outside/x.png", "../media2/x.png", "link/x.png")  # fmt: skip
    for path, reason in {**dict.fromkeys(outer, "leaves"), "a\0b": "invalid media path"}.items():
        with pytest.raises(BadSample, match=reason):
            confine(root, path)


def test_a_turn_is_cut_at_its_placeholders_and_at_nothing_that_looks_like_one():
    text = "<image> is <image>, <video>"
    assert Turn("user", text).pieces() == ["", "image", " is ", "image", ", ", "video", ""]
    assert Turn("user", text, literal=(11,)).pieces() == ["", "image", " is <image>, ", "video", ""]
    assert Turn("assistant", text).pieces() == Turn("system", text).pieces() == [text]
