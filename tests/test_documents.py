"""The documents stay true: the links, paths, tests, make targets and tables they name exist; the doors are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_doors import ALLOWED, FLOORS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("*.md"))
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
MADE_BY_RUNNING = tuple(line.strip("/") + "/" for line in (ROOT / ".gitignore").read_text().split())


def is_repo_path(text: str) -> bool:
    """Has a slash, and an extension or a slash at the end; not a placeholder, a URL or something a run makes."""
    looks_like_one = re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*(/|/[\w*-]*\.[a-z][a-z0-9]*)", text) is not None
    return looks_like_one and not text.startswith(MADE_BY_RUNNING)


def problems_of(text: str, root: Path) -> list[str]:
    fenced = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    prose = fenced.sub("", text)
    quoted = set(re.findall(r"`([^`\n]+)`", prose))
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link}
    tests = {name for q in quoted for name in re.findall(r"\btest_\w+\b(?!\.py)", q)}
    defined = {n for path in root.glob("tests/**/*.py") for n in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    commands = "\n".join([*fenced.findall(text), *quoted])
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    return [
        *(f"link {link}" for link in sorted(links) if link and not (root / link).exists()),
        *(f"path {path}" for path in sorted(quoted) if is_repo_path(path) and not any(root.glob(path.rstrip("/")))),
        *(f"test {name}" for name in sorted(tests - defined)),
        *(f"target {t}" for t in sorted(set(re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE)) - targets)),
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_what_a_document_names_exists(path):
    assert problems_of(path.read_text(), ROOT) == []


def test_the_test_sees_what_is_missing():
    text = "[a](no.md) `no/such.py` `no/` `test_no` `make no` `sql/*.sql` `data/demo/` `<a>/b.py`\n```\nmake ni\n```"
    assert problems_of(text, ROOT) == [
        "link no.md",
        "path no/",
        "path no/such.py",
        "path sql/*.sql",
        "test test_no",
        "target ni",
        "target no",
    ]


def test_the_rooms_table_is_the_doors():
    floors, libraries = {}, {}
    for floor, rooms, allowed in re.findall(r"^\| (\d) \| (.+?) \| .+ \| (.*)\|$", ARCHITECTURE, re.MULTILINE):
        for room in re.findall(r"`(\w+)`", rooms):
            floors[room], libraries[room] = int(floor), set(re.findall(r"`(\w+)`", allowed))
    assert floors == FLOORS
    assert libraries == ALLOWED


def test_every_table_is_described():
    sql = "".join(path.read_text() for path in ROOT.glob("sql/migrations/*.sql"))
    tables = set(re.findall(r"^create table (\w+)", sql, re.MULTILINE))
    tables -= set(re.findall(r"^alter table (\w+) rename to", sql, re.MULTILINE))
    assert tables
    assert {table for table in tables if f"`{table}`" not in ARCHITECTURE} == set()
