from pathlib import Path

import pytest

from dflop.data.path_patterns import expand
from dflop.errors import ConfigError

NAMES = ["a.json", "b.json", "s-000.tar", "s-001.tar", "s-002.tar", "t9.tar", "t10.tar", "w{a,b}[0].json", "sub/c.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for name in NAMES:
        (tmp_path / "data" / name).touch()
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.json", ["a.json"]), ("{b,a}.json", ["b.json", "a.json"]),
        ("s-{000..002}.tar", ["s-000.tar", "s-001.tar", "s-002.tar"]), ("s-{002..001}.tar", ["s-002.tar", "s-001.tar"]),
        ("t{9..10}.tar", ["t9.tar", "t10.tar"]),
        ("{s-{000..001},t9}.tar", ["s-000.tar", "t9.tar", "s-001.tar", "t9.tar"]),
        ("{a,sub/c}.{json,json}", ["a.json", "a.json", "sub/c.json", "sub/c.json"]),
        ("s-*.tar", ["s-000.tar", "s-001.tar", "s-002.tar"]), ("**/c.json", ["sub/c.json"]),
        ("{b,s-*}?????", ["b.json", "s-000.tar", "s-001.tar", "s-002.tar"]), ("w{a,b}[0].json", ["w{a,b}[0].json"]),
    ],
)  # fmt: skip
def test_braces_and_globs(folder, monkeypatch, pattern, names):
    assert expand(f"{folder}/{pattern}", Path("/")) == tuple(folder / name for name in names)
    assert expand(f"data/{pattern}", folder.parent) == tuple(folder / name for name in names), "beside the mixture"
    monkeypatch.chdir(folder)
    assert expand(pattern, Path("/")) == tuple(Path(name) for name in names), "in the working directory"


@pytest.mark.parametrize(
    "pattern", ["none.json", "{a,none}.json", "none*.json", "s-{000..003}.tar", "s-{0..2}.tar", "{a}.json"]
)
def test_a_file_that_is_not_there_is_named(folder, pattern):
    with pytest.raises(ConfigError, match=r"no file `.*(none|003|s-0|\{a\})"):
        expand(pattern, folder)


def test_ranges_are_bounded():
    with pytest.raises(ConfigError, match="more than 1000000 files"):
        expand("{0..999999999999}.tar", Path())
