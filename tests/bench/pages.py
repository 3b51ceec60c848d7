"""Puts what was measured into the documents: `python -m tests.bench.pages`.

A document has `<!-- table NAME -->` and, some lines below, `<!-- end -->`; what is between them is made from the newest
result of the machine that `SHOWN` names, with a line that says which.
"""

import importlib
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.bench.figures import RESULTS, ROOT

XEON, EPYC = "2-core-intel-xeon", "2-core-amd-epyc"
SHOWN = (
    ("schedule-real", XEON, "tests.bench.schedule"), ("engine", XEON, "tests.bench.engine"),
    ("data", XEON, "tests.bench.data"), ("suite", EPYC, "tests.bench.suite_tables"),
    ("compiled", EPYC, "tests.bench.suite_tables"),
    ("settings", EPYC, "tests.bench.suite_tables"), ("hosts", EPYC, "tests.bench.suite_tables"),
    ("real", EPYC, "tests.bench.suite_tables"), ("experts", EPYC, "tests.bench.suite_tables"),
    ("fp8", EPYC, "tests.bench.suite_tables"),
    ("correct", EPYC, "tests.bench.correct"), ("trainer", EPYC, "tests.bench.trainer"),
    ("verdicts", EPYC, "tests.bench.verdicts"), ("endtoend", EPYC, "tests.bench.endtoend"),
    ("dealt", EPYC, "tests.bench.dealt"), ("packed", EPYC, "tests.bench.packing"),
    ("context", EPYC, "tests.bench.context"), ("balance", EPYC, "tests.bench.balance"),
    ("models", EPYC, "tests.bench.models"), ("chaos", EPYC, "tests.chaos.page"),
    ("chaos-slurm", EPYC, "tests.chaos.page"), ("fuzz", EPYC, "tests.fuzz.page"),
)  # fmt: skip
"""(part, machine whose newest result is shown, module with `tables(content)`: Markdown by name)."""
BLOCK = re.compile(r"^(<!-- table (?P<name>[\w-]+) -->\n)(?P<text>.*?)^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"^<!-- (?:table |end -->)", re.MULTILINE)
DATE = "2000-01-01"
Block = Callable[[Path], str]
"""From the folder of a document to Markdown."""


@dataclass(frozen=True)
class Result:
    """One file of results."""

    path: Path

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def date(self) -> str:
        return self.path.stem[-len(DATE) :]

    @property
    def part(self) -> str:
        return self.path.stem[: -len(DATE) - 1]

    @cached_property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return found

    def link(self, folder: Path) -> str:
        """To the file, from a document in `folder`."""
        return f"[{self.machine}/{self.path.name}]({os.path.relpath(self.path, folder)})"

    def source(self, folder: Path) -> str:
        """The line below a table: machine and dated file, commit, picture."""
        about = self.content["machine"]
        changes = " with changes" if about.get("is_dirty") else ""
        commit = f", commit {about['commit'][:10]}{changes}" if about.get("commit") else ""
        picture = self.path.with_suffix(".svg")
        drawn = f"; [picture]({os.path.relpath(picture, folder)})" if picture.is_file() else ""
        others = f"; the others' figures by {of[:10]}" if (of := self.content.get("rivals_commit")) else ""
        return f"*{self.link(folder)}{commit}{others}{drawn}*"


def results(root: Path) -> Iterator[Result]:
    """All files of whole parts below `root`, by machine; those of a subset are not among them."""
    for path in sorted(root.glob("*/*.json")):
        if not (found := Result(path)).part.endswith("-subset"):
            yield found


def newest(root: Path, part: str, machine: str) -> Result:
    """The newest result of a part on a machine.

    Raises:
        ValueError: there is none.
    """
    found = [r for r in results(root) if (r.part, r.machine) == (part, machine)]
    if not found:
        raise ValueError(
            f"{root / machine} has no result of `{part}`: run python -m tests.bench --full --part {part}, or show "
            "another machine's in tests/bench/pages.py"
        )
    return max(found, key=lambda r: r.date)


def generated(shown: Iterable[tuple[str, str, str]], root: Path) -> dict[str, Block]:
    """Every block there is, by name."""
    found: dict[str, Block] = {}
    for part, machine, module in shown:
        result = newest(root, part, machine)
        for name, text in importlib.import_module(module).tables(result.content).items():
            found[name] = lambda folder, text=text, result=result: f"{text}\n\n{result.source(folder)}"
    return found


def documents(root: Path) -> list[Path]:
    """What people read."""
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md")])


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
        ValueError: an unknown name, or a marker without its other half.
    """

    def made(match: re.Match[str]) -> str:
        if match["name"] not in blocks:
            raise ValueError(f"{path}: no table is called `{match['name']}`; there are {', '.join(sorted(blocks))}")
        return f"{match[1]}\n{wrapped(blocks[match['name']](path.parent))}\n\n{match[4]}"

    new = BLOCK.sub(made, text)
    if 2 * len(BLOCK.findall(new)) != len(MARKER.findall(new)):
        raise ValueError(f"{path}: a marker lacks its other half, or is not on lines of its own")
    return new


def main() -> None:
    blocks = generated(SHOWN, RESULTS)
    for path in documents(ROOT):
        text = path.read_text(encoding="utf-8")
        new = filled(text, blocks, path)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
