"""Docstrings of public functions name the errors that their own code raises; all name their subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "dflop").rglob("*.py"), *(ROOT / "flows").glob("*.py")])
FILES = [path for path in FILES if path.parent.name != "cli"]  # what bodies of commands raise is told to people
OURS_ALONE = {"AssertionError", "NotImplementedError", "SystemExit", "KeyboardInterrupt", "StopIteration"}
"""Errors that say that we are wrong, or that end the process: nobody handles them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(path: Path) -> Iterator[tuple[str, Function]]:
    """(name, node) of functions and methods that others may call."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def raised_by(function: Function) -> set[str]:
    """Names of the errors that a function's own statements raise and do not catch; of a raised variable nothing."""
    return set(_raised(function.body, caught=frozenset()))


def _raised(statements: list[ast.stmt], caught: frozenset[str]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise):
            call = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = getattr(call, "id", "")  # errors of other modules (`tarfile.ReadError`) do not get far
            if name[:1].isupper() and name not in caught | OURS_ALONE:
                yield name
        if isinstance(node, ast.Try):
            handled = {n.id for h in node.handlers if h.type for n in ast.walk(h.type) if isinstance(n, ast.Name)}
            yield from _raised(node.body, caught | handled)
            for handler in node.handlers:
                yield from _raised(handler.body, caught)
            yield from _raised([*node.orelse, *node.finalbody], caught)
            continue
        for field in ("body", "orelse"):
            yield from _raised([s for s in getattr(node, field, []) if isinstance(s, ast.stmt)], caught)
        for case in getattr(node, "cases", []):
            yield from _raised(case.body, caught)


def unnamed(function: Function) -> set[str]:
    """Errors that a docstring should name in its `Raises:` and does not."""
    text = ast.get_docstring(function)
    if text is None:
        return set()  # methods whose name and type say it all, and those that a protocol or base class describes
    _, _, raises = text.partition("Raises:")
    return {name for name in raised_by(function) if name not in raises}


def test_docstrings_name_the_errors_raised():
    missing = {
        f"{path.relative_to(ROOT)}: {name}": unnamed(node) for path in FILES for name, node in public_functions(path)
    }
    assert {where: names for where, names in missing.items() if names} == {}


def test_docstrings_say_what_they_are_about():
    """`Of the cluster.` behind `num_gpus` leaves the subject to the reader."""
    headless = re.compile(r'\s*"""(Of|Those|That|Its|Whoever) ')
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if headless.match(line)
    ]
    assert found == []
