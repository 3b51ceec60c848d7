"""Every finding of ruff or mypy that is suppressed says why: behind the code on its line, or in a comment above."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPRESSED = re.compile(r"#\s*(?:type:\s*ignore\b(\[[^\]]*\])?|noqa\b(:\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*)?)")


def without_reason(text: str) -> list[str]:
    """What is suppressed without a code, or without words about it."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        if not (matches := list(SUPPRESSED.finditer(line))):
            continue
        has_codes = all(any(m.groups()) for m in matches)
        words = re.sub(r"[^a-zA-Z]", "", line[matches[-1].end() :])
        is_told_above = number > 0 and lines[number - 1].lstrip().startswith("# ")
        if not has_codes or not (words or is_told_above):
            found.append(f"{number + 1}: {line.strip()}")
    return found


def test_what_is_suppressed_says_why():
    files = [path for folder in ("dflop", "flows") for path in (ROOT / folder).rglob("*.py")]
    assert {str(f.relative_to(ROOT)): found for f in files if (found := without_reason(f.read_text()))} == {}
