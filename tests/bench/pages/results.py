"""Result files: where they are, which is the newest, what a document says of where its figures come from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.bench.campaign import told_command
from tests.bench.markdown import table
from tests.bench.parts import PARTS, Part

CAMPAIGNS = {
    "chaos": "whole runs under faults drawn by lot",
    "chaos-slurm": "the same on a real Slurm, with its own faults",
    "fuzz": "made-up input for whoever reads any",
}
"""What has results and is no part of the benchmark."""
NAME = r"(?P<part>[a-z-]+)-(?P<date>\d{4}-\d{2}-\d{2})"


class PagesError(Exception):
    """A document asks for what no result has; the message says what to do."""


@dataclass(frozen=True)
class Result:
    """One file."""

    path: Path

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def date(self) -> str:
        return self.path.stem[-len("2000-01-01") :]

    @property
    def part(self) -> str:
        return self.path.stem[: -len("-2000-01-01")]

    @cached_property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return found

    def link(self, folder: Path) -> str:
        """To the file, from a document in `folder`."""
        return f"[{self.path.name}]({os.path.relpath(self.path, folder)})"

    def source(self, folder: Path) -> str:
        """The line below a table: file, machine, commit, picture."""
        about = self.content["machine"]
        changes = " with changes" if about.get("is_dirty") else ""
        commit = f", commit {about['commit'][:10]}{changes}" if about.get("commit") else ""
        picture = self.path.with_suffix(".svg")
        drawn = f"; [picture]({os.path.relpath(picture, folder)})" if picture.is_file() else ""
        return f"*{self.link(folder)}: {about['num_cores']} cores of {about['cpu']}, {self.date}{commit}{drawn}*"


def results(root: Path) -> Iterator[Result]:
    """All files of whole parts below `root`, those of a subset not among them."""
    for path in sorted(root.glob("*/*.json")):
        if not (found := Result(path)).part.endswith("-subset"):
            yield found


def newest(root: Path, part: str, machine: str) -> Result:
    """The newest result of a part on a machine.

    Raises:
        PagesError: there is none.
    """
    found = [r for r in results(root) if (r.part, r.machine) == (part, machine)]
    if not found:
        raise PagesError(
            f"{root / machine} has no result of `{part}`: run python -m tests.bench --full --part {part}, or show "
            "another machine's in tests/bench/pages/shown.py"
        )
    return max(found, key=lambda r: r.date)


def overview(root: Path, folder: Path) -> str:
    """The newest file of every part, on whichever machine, with its command and the bounds it met."""
    latest: dict[str, Result] = {}
    for result in results(root):
        if result.part not in latest or result.date > latest[result.part].date:
            latest[result.part] = result
    what = {part.name: part for part in PARTS}
    rows = []
    for name in sorted(latest):
        content, part = latest[name].content, what.get(name)
        told = part.what if part else CAMPAIGNS.get(name, "")
        rows.append((latest[name].link(folder), latest[name].machine, told, _command(content, part), _met(content)))
    return table(("file", "machine", "what", "command", "bounds met"), rows)


def _command(content: dict[str, Any], part: Part | None) -> str:
    """As it was run; what would be run today where the file does not say."""
    if "command" in content:
        return f"`{content['command']}`"
    return f"`{told_command(part, {}, True)}`" if part else ""


def _met(content: dict[str, Any]) -> str:
    if "num_bounds" not in content:
        return ""
    missed = content["missed"]
    return f"{content['num_bounds'] - len(missed)} of {content['num_bounds']}"
