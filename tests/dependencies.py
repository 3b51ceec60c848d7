"""What dflop brings along: `python -m tests.dependencies [--network] [--write]`.

Every distribution that dflop and its extras require, and theirs, as far as it is installed here, by licence. `--write`
puts those whose licence asks something of who changes them into docs/appendix.md. `--network` imports the libraries
that dflop imports, in a process of their own in which Python's audit hooks tell of every connection and every look-up
of a name.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.bench import markdown
from tests.test_imports import libraries

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "appendix.md"
MARKS = "<!-- dependencies -->", "<!-- end of dependencies -->"
ACCELERATOR = re.compile(r"nvidia-|cuda-|triton$|flash-attn$")
"""Come with builds of torch for a device, whose versions torch itself names."""
COPYLEFT = re.compile(r"GNU|GPL|MPL|Mozilla|Artistic|not stated")
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


def table(licences: re.Pattern[str]) -> str:
    """By licence all but what accelerators and development need; in italics what only extras need."""
    needed, by_licence = set(_closure("")), dict[str, list[str]]()
    extras = set(metadata.metadata("dflop").get_all("Provides-Extra") or []) - {"dev"}
    for name in sorted(needed.union(*map(_closure, extras))):
        if not ACCELERATOR.match(name):
            by_licence.setdefault(_licence(name), []).append(name if name in needed else f"*{name}*")
    return markdown.table(
        ("licence", "distributions"),
        [(key, ", ".join(of)) for key, of in sorted(by_licence.items()) if licences.search(key)],
    )


def network_at_import() -> dict[str, list[str]]:
    """What happens when everything that dflop imports is imported: `seen` connections, `failed` imports, `modules`."""
    names = sorted({name for allowed in libraries().values() for name in allowed})
    done = subprocess.run([sys.executable, "-P", "-c", _IMPORTS, json.dumps(names)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def written(text: str) -> str:
    """The page with the table of today between its marks."""
    before, after = MARKS
    head, tail = text.partition(before)[0], text.partition(after)[2]
    return f"{head}{before}\n\n{table(COPYLEFT)}\n\n{after}{tail}"


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


def main() -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", action="store_true", help="watch the network while everything is imported")
    parser.add_argument("--write", action="store_true", help="put it into the page")
    given = parser.parse_args()
    if given.network:
        seen = network_at_import()
        print(f"{len(seen['modules'])} top-level modules imported, {len(seen['seen'])} connections or look-ups")
        print("\n".join(seen["seen"]), end="")
        return 1 if seen["seen"] else 0
    if given.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(re.compile("")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
