"""Builds the documentation site offline: `make docs`, or `python -m docs.site`; open .site/html/index.html.

The pages of the repository, and reference pages made from the code: commands from their help, configuration keys from
the schema, tables and views from the comments of the SQL. Links to other files lead to the repository. The build fails
on a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb

from dflop.cli import app
from dflop.config import json_schema
from dflop.store import migrate

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".site"
REPOSITORY = "https://github.com/dflop/dflop/blob/main"
COMMAND = re.compile(r"^##+ (dflop [\w -]+)\n\n(?:```.+?```\n\n)?(.+?)\n\n", re.MULTILINE | re.DOTALL)
"""A command's section: its name and the first paragraph of its help."""
WORKER_PACKAGE = "https://unpkg.com/iframe-worker/shim"
FILE_WORKER = """if (location.protocol === "file:") {
  const address = URL.createObjectURL(new Blob([%s]))
  window.Worker = class extends Worker { constructor() { super(address) } }
}
"""
LINK = re.compile(r"(\]\()([^)\s:]+)(\))")
PAGES = {
    "Start": (
        "README.md",
        "docs/tutorial.md",
        "docs/guide.md",
        "docs/use-the-model.md",
        "docs/formats.md",
        "docs/glossary.md",
        "docs/sampler.md",
        "docs/balance.md",
    ),
    "Operate": ("docs/first-cluster-run.md", "docs/operating.md", "docs/sql-recipes.md", "docs/security.md"),
    "Reference": ("reference/commands.md", "reference/configuration.md", "reference/data.md"),
    "Results": (
        "docs/measured.md",
        "docs/gpus.md",
        "docs/appendix.md",
        "docs/models.md",
        "docs/comparison.md",
        "docs/tried.md",
    ),
    "Project": ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"),
}


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |" for line in lines
    )


def commands() -> Iterator[str]:
    """Every command from its help, all of them in a table first."""
    text = app.generate_docs(output_format="markdown").replace(" -m docs.site", "")  # cyclopts looks at what runs
    head, first = text.index("\n## "), text.index("\n## dflop ")
    rows = [(f"[`{name}`](#{name.replace(' ', '-')})", what) for name, what in COMMAND.findall(text)]
    yield text[:head].replace("# dflop", "# Commands", 1).strip()
    yield table(("command", "what it does"), rows)
    yield text[first:].strip()


def configuration() -> Iterator[str]:
    """Every key of a run's configuration with type, default and meaning, a section at a time."""
    schema = json_schema()
    yield "# Configuration keys"
    yield from _section("", schema, schema["$defs"])


def _section(prefix: str, schema: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    rows, inner = [], []
    for key, field in schema["properties"].items():
        options = [field, *field.get("anyOf", []), *field.get("allOf", []), field.get("items", {})]
        names = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
        inner += [(f"{prefix}{key}.", known[name]) for name in names if "properties" in known[name]]
        default = "" if names or field.get("default") in ("", [], {}, None) else f"`{field['default']}`"
        rows.append((f"`{prefix}{key}`", _type(field), default, field.get("description", "")))
    yield f"## {prefix.rstrip('.') or 'Run'}\n\n{schema.get('description', '')}"
    yield table(("key", "type", "default", "meaning"), rows)
    for path, section in inner:
        yield from _section(path, section, known)


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_type, field["anyOf"])))
    if "$ref" in field or "allOf" in field:
        return "section"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    limits = [f"{word} {field[name]}" for name, word in bounds.items() if name in field]
    return " ".join([str(field.get("type", "any")).replace("string", "text"), *limits])


def data() -> Iterator[str]:
    """Every table and view with its columns."""
    con = duckdb.connect()
    migrate.apply(con)
    relations = con.sql("""
        select table_name, comment from duckdb_tables() where not internal
        union all select view_name, comment from duckdb_views() where not internal order by 1
    """).fetchall()
    columns = con.sql("""
        select table_name, column_name, data_type, comment from duckdb_columns()
        where not internal and not starts_with(column_name, '_') order by table_name, column_index
    """).fetchall()
    by_relation = {name: list(rows) for name, rows in groupby(columns, key=lambda row: row[0])}
    yield "# Tables and views"
    for name, comment in relations:
        rows = [(f"`{column}`", kind.lower(), text or "") for _, column, kind, text in by_relation[name]]
        yield f"## {name}\n\n{comment}\n\n{table(('column', 'type', 'meaning'), rows)}"


def moved(path: str) -> str:
    """Where a page of the repository is on the site."""
    return {"README.md": "index.md"}.get(path, path.removeprefix("docs/"))


def page(path: str) -> str:
    """A page of the repository with its links as the site has them."""

    def rewritten(match: re.Match[str]) -> str:
        name, _, anchor = match[2].partition("#")
        if not name:
            return match[0]
        target = os.path.relpath((ROOT / path).parent / name, ROOT)
        is_here = any(target in pages for pages in PAGES.values()) or target.endswith(".png")
        to = moved(target) if is_here else f"{REPOSITORY}/{target}"
        return f"{match[1]}{to}{'#' * bool(anchor)}{anchor}{match[3]}"

    return LINK.sub(rewritten, (ROOT / path).read_text(encoding="utf-8"))


def write_sources() -> None:
    """All pages, pictures and the configuration of the site, anew."""
    shutil.rmtree(SITE, ignore_errors=True)
    pages = {moved(path): page(path) for paths in PAGES.values() for path in paths if not path.startswith("reference/")}
    pages |= {
        f"reference/{name}.md": "\n\n".join(text)
        for name, text in (("commands", commands()), ("configuration", configuration()), ("data", data()))
    }
    for name, text in pages.items():
        file = SITE / "pages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    for picture in (ROOT / "docs").glob("*.png"):
        shutil.copy(picture, SITE / "pages")
    nav = [{title: [moved(path) for path in paths]} for title, paths in PAGES.items()]
    listed = ", ".join(f'{{ "{title}" = {paths} }}'.replace("'", '"') for part in nav for title, paths in part.items())
    (SITE / "zensical.toml").write_text(
        f'[project]\nsite_name = "dflop"\ndocs_dir = "pages"\nsite_dir = "html"\nuse_directory_urls = false\n'
        f'nav = [{listed}]\n[project.theme]\nfont = false\nfeatures = ["navigation.sections"]\n'
        "[project.plugins.offline]\n[project.markdown_extensions.tables]\n[project.markdown_extensions.pymdownx.superfences]\n"
        "[project.markdown_extensions.toc]\n"
    )


def search_from_disk(html: Path) -> None:
    """Let search work where pages are files: browsers start no worker from one, so its code travels in a script.

    zensical would load a package from the network for that.
    """
    (worker,) = html.glob("assets/javascripts/workers/search.*.js")
    script = html / "assets/javascripts/file_worker.js"
    script.write_text(FILE_WORKER % json.dumps(worker.read_text(encoding="utf-8")), encoding="utf-8")
    for file in html.rglob("*.html"):
        text, to = file.read_text(encoding="utf-8"), os.path.relpath(script, file.parent)
        assert WORKER_PACKAGE in text, f"{file} loads search in another way"
        file.write_text(text.replace(WORKER_PACKAGE, to), encoding="utf-8")


def main() -> None:
    """Build the site; zensical checks its links and anchors."""
    write_sources()
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "-f", SITE / "zensical.toml"], check=True)
    search_from_disk(SITE / "html")
    print(SITE / "html" / "index.html")


if __name__ == "__main__":
    main()
