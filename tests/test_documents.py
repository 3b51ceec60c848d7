"""The documents stay true: the links, anchors, paths, tests, make targets and tables they name exist; the doors and the
schema they draw are those of the code."""

import dataclasses
import re
from pathlib import Path

import pytest

from dflop.store import schema
from docs import site
from docs.strings import strings
from tests.lanes import LANES
from tests.test_imports import floors, libraries

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
MADE_BY_RUNNING = tuple(line.strip("/") + "/" for line in (ROOT / ".gitignore").read_text().split())
AVOIDED = re.compile(r"\b(beside|told|reckon\w*|data-blind|of (its|their) own|goes on|quick plans?|learnt|healthy)\b")
"""Words of the project's first texts, which the field has others for; docs/glossary.md."""
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def is_repo_path(text: str) -> bool:
    """Has a slash, and an extension or a slash at the end; not a placeholder, a URL or something a run makes."""
    looks_like_one = re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*(/|/[\w*-]*\.[a-z][a-z0-9]*)", text) is not None
    return looks_like_one and not text.startswith(MADE_BY_RUNNING)


def anchors_of(path: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(link: str, folder: Path) -> bool:
    """Whether a link within the repository leads nowhere; `folder` is where the document is."""
    name, _, anchor = link.partition("#")
    target = (folder / name).resolve()
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors_of(target)


def problems_of(text: str, root: Path, folder: Path | None = None) -> list[str]:
    prose = FENCED.sub("", text)
    quoted = set(re.findall(r"`([^`\n]+)`", prose))
    links = {link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link}
    tests = {name for q in quoted for name in re.findall(r"\btest_\w+\b(?!\.py)", q)}
    defined = {n for path in root.glob("tests/**/*.py") for n in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    commands = "\n".join([*FENCED.findall(text), *quoted])
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"lane-{name}" for name in LANES}
    return [
        *(f"link {link}" for link in sorted(links) if not link.startswith("#") and broken(link, folder or root)),
        *(f"path {path}" for path in sorted(quoted) if is_repo_path(path) and not any(root.glob(path.rstrip("/")))),
        *(f"test {name}" for name in sorted(tests - defined)),
        *(f"target {t}" for t in sorted(set(re.findall(r"^make ([a-z0-9-]+)", commands, re.MULTILINE)) - targets)),
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_document_names_exists(path):
    assert problems_of(path.read_text(), ROOT, path.parent) == []


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")}


def test_every_cell_of_the_comparison_names_its_source():
    """Each cell says nothing (-), or ends with a source that is listed; what is claimed of ourselves has one, too."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    listed = set(re.findall(r"^- (\[\w\]) ", text, re.MULTILINE))
    rows = re.findall(r"^\| (?!feature|-)(.+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) >= 10
    used = set()
    for row in rows:
        _, *cells = row.split(" | ")
        for cell in cells:
            sources = re.findall(r"\[\w\]", cell)
            assert sources or cell == "-", cell
            used.update(sources)
    assert used == listed


def test_strings_that_people_read_are_in_the_terms_of_the_field():
    released = "sql/migrations/00"  # whose texts are hashed in stores; 0017 says them anew
    found = [each for each in strings() if AVOIDED.search(re.sub(r"{.*?}", "", each[2]))]
    assert [each for each in found if not each[0].startswith(released)] == []


def test_reference_pages_have_every_relation_and_section():
    text = "\n".join((*site.data(), *site.configuration()))
    assert all(f"## {name}\n" in text for name in (*schema.KINDS, "v_run_summary", "plan", "train", "cluster.slurm"))


def test_the_rooms_table_is_that_of_pyproject():
    drawn, may_import = {}, {}
    for floor, rooms, allowed in re.findall(r"^\| (\d+) \| (.+?) \| .+ \| (.*)\|$", ARCHITECTURE, re.MULTILINE):
        for room in re.findall(r"`(\w+)`", rooms):
            drawn[room], may_import[room] = int(floor), set(re.findall(r"`(\w+)`", allowed))
    assert drawn == floors()
    assert may_import == libraries()


def test_the_schema_picture_is_the_schema():
    """Every kind of record is drawn once, with columns that it has; an arrow leads to a table that is drawn."""
    (picture,) = re.findall(r"^```schema\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    drawn = {}
    for line in picture.splitlines():
        name, rest = re.fullmatch(r" *(\w+) +(.+)", line).groups()
        keys, _, arrows = re.sub(r" {2,}", "\t", rest).partition("\t")
        assert name not in drawn, f"{name} is drawn twice"
        drawn[name] = (keys.split(", "), [tuple(a.split(" -> ")) for a in arrows.split("; ") if a])
    assert set(drawn) == set(schema.KINDS)
    for name, (keys, arrows) in drawn.items():
        fields = {field.name for field in dataclasses.fields(schema.KINDS[name])}
        assert set(keys) <= fields, name
        for columns, target in arrows:
            assert set(columns.split(", ")) <= fields, name
            assert target in drawn, name


def test_every_table_is_described():
    sql = "".join(path.read_text() for path in ROOT.glob("sql/migrations/*.sql"))
    tables = set(re.findall(r"^create table (\w+)", sql, re.MULTILINE))
    tables -= {*re.findall(r"^alter table (\w+) rename to", sql, re.MULTILINE), *schema.RETIRED}
    assert tables
    assert {table for table in tables if f"`{table}`" not in ARCHITECTURE} == set()
