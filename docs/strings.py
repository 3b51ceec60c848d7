"""Every string that a person can meet: `python -m docs.strings [PATH ...]` lists them as `file:line: text`.

Strings of two words or more in `dflop/` and `flows/` (help, log lines, errors, reports, form fields), SQL comments,
headers of queries, comments of shipped configurations and scripts; docstrings of commands, flows and keys.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("dflop/**/*.py", "flows/*.py", "sql/**/*.sql", "configs/**/*.yaml", "slurm/*", "prefect.yaml", "Makefile")
READ_DOCSTRINGS = ("dflop/cli/", "dflop/config/sections.py", "dflop/config/slurm_section.py", "flows/")
PROSE = re.compile(r"[A-Za-z]{2,}[,:;.]? [a-z(]")
SQL_TEXT = re.compile(
    r"comment on [^']*?\bis\b[^']*'((?:[^']|'')*(?:'\n'(?:[^']|'')*)*)'"
    r"|^-- (?:purpose|grain|units|parameters): (.*)$|(?:format|concat|error)\(\s*'([^'\n]*)'",
    re.MULTILINE,
)


def strings(*paths: str) -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of every string; `paths`: beginnings of file names."""
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}):
        name = str(path.relative_to(ROOT))
        if name.startswith(paths or ""):
            found = {".py": _of_python, ".sql": _of_sql}.get(path.suffix, _of_comments)(path.read_text("utf-8"), name)
            yield from ((name, line, " ".join(text.split())) for line, text in found)


def _of_python(source: str, name: str) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    public = docstrings - {id(node.body[0].value) for node in nodes if _is_private(node)}
    read = public if name.startswith(READ_DOCSTRINGS) else set()
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        is_text = isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in (docstrings - read) | parts
        if is_text and PROSE.search(text := _text(node)):
            yield node.lineno, text


def _is_private(node: ast.AST) -> bool:
    """Whether it has a docstring that nobody but developers reads: a module, or what begins with an underscore."""
    is_block = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name.startswith("_")
    return (is_block or isinstance(node, ast.Module)) and isinstance(next(iter(node.body), None), ast.Expr)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(
        _text(part) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}" for part in parts
    )


def _of_sql(source: str, _name: str) -> Iterator[tuple[int, str]]:
    for match in SQL_TEXT.finditer(source):
        text = match[1] or match[2] or match[3] or ""
        yield source.count("\n", 0, match.start()) + 1, text.replace("'\n'", "").replace("''", "'")


def _of_comments(source: str, _name: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if PROSE.search(text := re.split(r"# |echo ", line, maxsplit=1)[-1]) and text != line:
            yield number, text


if __name__ == "__main__":
    listed = [f"{name}:{line}: {text}" for name, line, text in strings(*sys.argv[1:])]
    print(*listed, sep="\n")
    print(f"{len(listed)} strings", file=sys.stderr)
