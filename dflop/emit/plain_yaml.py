"""YAML of nested dicts, without a library for it."""

from __future__ import annotations

import json
from typing import Any


def yaml_text(tree: dict[str, Any], indent: str = "") -> str:
    """Nested dicts with plain keys as YAML, whose scalars may be written as in JSON."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
