"""Blocks of documents that are made from results."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.bench.pages.results import PagesError, newest, overview
from tests.bench.pages.shown import Shown

BLOCK = re.compile(r"^(<!-- table (?P<name>[\w-]+) -->\n)(?P<text>.*?)^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"^<!-- (?:table |end -->)", re.MULTILINE)
OPENING, CLOSING = "<!-- table ", "<!-- end -->"
Block = Callable[[Path], str]
"""From the folder of a document to Markdown."""


def documents(root: Path) -> list[Path]:
    """What people read."""
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md")])


def generated(shown: Iterable[Shown], root: Path) -> dict[str, Block]:
    """Every block there is, by name; `results` is the table of all files.

    Raises:
        PagesError: a result is missing, or two tables have one name.
    """
    found: dict[str, Block] = {"results": lambda folder: overview(root, folder)}
    for one in shown:
        result = newest(root, one.part, one.machine)
        for name, text in importlib.import_module(one.page).tables(result.content).items():
            if name in found:
                raise PagesError(f"two tables are called `{name}`, one of them by {one.page}")
            found[name] = lambda folder, text=text, result=result: f"{text}\n\n{result.source(folder)}"
    return found


def wrapped(text: str) -> str:
    """Lines of prose at most as long as those people write; rows of tables stay whole."""
    wrapper = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    lines: list[str] = []
    for line in text.splitlines():
        lines += [line] if line.startswith("|") or not line else wrapper.wrap(line)
    return "\n".join(lines)


def filled(text: str, blocks: Mapping[str, Block], path: Path) -> str:
    """The document with every block made anew.

    Args:
        text: Of the document.
        blocks: By name.
        path: Of the document, for links and messages.

    Raises:
        PagesError: an unknown name, or a marker without its other half.
    """

    def made(match: re.Match[str]) -> str:
        if match["name"] not in blocks:
            raise PagesError(f"{path}: no table is called `{match['name']}`; there are {', '.join(sorted(blocks))}")
        if OPENING in match["text"]:
            raise PagesError(f"{path}: `{match[1].strip()}` has no {CLOSING}")
        return f"{match[1]}\n{wrapped(blocks[match['name']](path.parent))}\n\n{match[4]}"

    new = BLOCK.sub(made, text)
    if 2 * len(BLOCK.findall(new)) != len(MARKER.findall(new)):
        raise PagesError(f"{path}: a marker lacks its other half, or is not on lines of its own")
    return new
