"""What dflop brings along: `python -m tests.dependencies [--network] [--check | --write]`.

Every distribution that dflop and its extras require, and theirs, as far as it is installed here. `--write` puts the
table into docs/security.md, `--check` says whether it is there already. `--network` imports the libraries that dflop
imports, in a process of their own in which Python's audit hooks tell of every connection and every look-up of a name.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dflop.doctor.installed import read_constraints
from tests.test_imports import libraries

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
MARKS = "<!-- dependencies -->", "<!-- end of dependencies -->"
HEADER = ("distribution", "version", "licence", "pinned", "installed from", "by way of")
ACCELERATOR = re.compile(r"nvidia-|cuda-|triton$|flash-attn$")
"""Come with builds of torch for a device, whose versions torch itself names."""
_LONG = 48

_IMPORTS = """
import importlib, json, sys
seen, failed = [], []
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        seen.append(f"{event} {args[-1] if event == 'socket.connect' else args[0]}")
sys.addaudithook(hook)
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError:
        failed.append(name)
print(json.dumps({"seen": seen, "failed": failed, "modules": sorted({m.partition(".")[0] for m in sys.modules})}))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One distribution."""

    name: str
    version: str
    licence: str
    is_pinned: bool
    """constraints.txt names this version."""
    source: str
    """`wheel`: pure Python; `binary wheel`: of an index, for this platform; `built here`: compiled on this machine."""
    users: tuple[str, ...]
    """Extras of dflop that need it; empty: dflop itself does."""

    def cells(self) -> tuple[str, ...]:
        users = ", ".join(self.users) or "dflop"
        version = self.version if self.is_pinned else "-"  # which one there is depends on the environment
        return self.name, version, self.licence, "yes" if self.is_pinned else "no", self.source, users


def rows() -> list[Row]:
    """All of them by name, without what belongs to an accelerator."""
    constraints = {canonicalize_name(n): v for n, v in read_constraints(ROOT / "constraints.txt").items()}
    users: dict[str, set[str]] = {}
    extras = metadata.metadata("dflop").get_all("Provides-Extra") or []
    for extra in ("", *extras):
        for name in _closure(extra):
            users.setdefault(name, set()).add(extra)
    found = []
    for name, of in sorted(users.items()):
        if not ACCELERATOR.match(name):
            version = metadata.version(name).partition("+")[0]
            needed_by = () if "" in of else tuple(sorted(of))
            row = Row(name, version, _licence(name), constraints.get(name) == version, _source(name), needed_by)
            found.append(row)
    return found


def table(found: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(row.cells() for row in found)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def network_at_import() -> dict[str, list[str]]:
    """What happens when everything that dflop imports is imported: `seen` connections, `failed` imports, `modules`."""
    names = sorted({name for allowed in libraries().values() for name in allowed})
    done = subprocess.run([sys.executable, "-P", "-c", _IMPORTS, json.dumps(names)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def on_page(text: str) -> str:
    """The table between its marks."""
    before, after = MARKS
    return text.partition(before)[2].partition(after)[0].strip()


def _closure(extra: str) -> Iterator[str]:
    """Names of what is installed of dflop's requirements, theirs included; `extra` of dflop, or none."""
    waiting, known = [("dflop", extra)], set[tuple[str, str]]()
    while waiting:
        name, of = waiting.pop()
        if (name, of) in known:
            continue
        known.add((name, of))
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name != "dflop":
            yield name
        for text in required:
            requirement = Requirement(text)
            if requirement.marker is None:
                is_wanted = name != "dflop" or not extra
            else:
                is_wanted = requirement.marker.evaluate({"extra": of})
                if name == "dflop" and extra:
                    is_wanted = is_wanted and not requirement.marker.evaluate({"extra": ""})
            if is_wanted:
                child = canonicalize_name(requirement.name)
                waiting += [(child, e) for e in ("", *requirement.extras)]


def _licence(name: str) -> str:
    about = metadata.metadata(name)
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if c.startswith("License :: ")]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    stated = about.get("License-Expression") or "; ".join(classifiers) or about.get("License") or "not stated"
    first = stated.strip().splitlines()[0]
    return first if len(first) <= _LONG else f"{first[: _LONG - 3]}..."


def _source(name: str) -> str:
    text = metadata.distribution(name).read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: (.+)$", text, re.MULTILINE)
    if not tags:
        return "no wheel"
    if all(tag.endswith("-none-any") for tag in tags):
        return "wheel"
    # An index takes no binaries for `linux`, only for the `manylinux` and `musllinux` of a glibc or musl.
    return "built here" if all(tag.rpartition("-")[2].startswith("linux_") for tag in tags) else "binary wheel"


def main() -> int:
    """Print the table, or compare or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", action="store_true", help="watch the network while everything is imported")
    parser.add_argument("--check", action="store_true", help="exit code 1 unless the page has this table")
    parser.add_argument("--write", action="store_true", help="put it into the page")
    given = parser.parse_args()
    found = rows()
    if given.network:
        seen = network_at_import()
        print(f"{len(seen['modules'])} top-level modules imported, {len(seen['seen'])} connections or look-ups")
        print("\n".join(seen["seen"]), end="")
        return 1 if seen["seen"] else 0
    made, text = table(found), PAGE.read_text(encoding="utf-8")
    if given.check:
        return 0 if on_page(text) == made else 1
    if given.write:
        before, after = MARKS
        head, tail = text.partition(before)[0], text.partition(before)[2].partition(after)[2]
        PAGE.write_text(f"{head}{before}\n\n{made}\n\n{after}{tail}", encoding="utf-8")
        return 0
    print(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
