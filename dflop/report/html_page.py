"""HTML documents to open from disk, copy or mail: one file each, and whoever opens it loads nothing from anywhere.

Style and scripts stand in the document and are allowed by their hashes, so that neither text of a user nor a browser's
extension can add any. No element has a `style` attribute, since that would need a policy that allows all of them. What
scripts need to know is JSON in a block of its own; they show it as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = "dflop.report"
STYLE = "page.css"
_JSON_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def render_page(template: str, scripts: Sequence[str], /, **values: Any) -> str:
    """A whole document, a pure function of what it is given.

    Args:
        template: File in `templates/`.
        scripts: Files in `templates/` that run when the document is there, in this order.
        values: For the template; text in them is escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = source_of(STYLE)
    script = "".join(source_of(name) for name in scripts)
    return environment.get_template(template).render(
        style=style, script=script, content_policy=content_policy(style, script), **values
    )


def source_of(name: str) -> str:
    """Text of a file in `templates/`."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def content_policy(style: str, script: str) -> str:
    """Content security policy under which nothing is loaded, and only this style and this script count."""
    allowed = [f"style-src {_hash(style)}"] + [f"script-src {_hash(script)}"] * bool(script)
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def json_block(value: Any) -> str:
    """JSON that can stand inside a `<script type="application/json">`, whatever strings are in it; NaN becomes null."""
    text = json.dumps(_without_nan(value), allow_nan=False, separators=(",", ":"))
    for mark, escape in _JSON_ESCAPES.items():
        text = text.replace(mark, escape)
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(v) for name, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, list | tuple) else value
