"""HTML documents to open from disk, copy or mail: one file each, which loads nothing from anywhere and runs nothing.

The style stands in the document and is allowed by its hash, so that neither text of a user nor a browser's extension
can add any, and no script is allowed at all. No element has a `style` attribute, since that would need a policy that
allows all of them.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

import jinja2

from dflop.report.tables import Table

TEMPLATES = Path(__file__).parent / "templates"
GLOSSARY = "What words mean: docs/glossary.md, https://github.com/dflop/dflop/blob/main/docs/glossary.md"
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """An inline `<svg>` and what it shows."""

    svg: str
    caption: str
    kinds: tuple[str, ...] = ()
    is_wide: bool = False
    """Whether it fills a row, and scrolls where there is no room, since its text would become too small."""


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page; what it has is shown in the order of these fields."""

    id: str
    title: str
    kinds: tuple[str, ...] = ()
    """How its numbers came about: `measured`, `simulated`, `predicted`, `analytic`."""
    text: str = ""
    facts: Pairs = ()
    """(name, value)."""
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    listing: tuple[str, str] = ("", "")
    """(title, text) of a text that is folded."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows, from top to bottom."""

    title: str
    subtitle: str
    kinds: tuple[str, ...]
    verdict: str
    numbers: tuple[tuple[str, str, str], ...]
    """(label, value, remark)."""
    sections: tuple[Section, ...]


def drawings(*found: tuple[str | None, str, tuple[str, ...]]) -> tuple[Drawing, ...]:
    """The (drawing, caption, kinds) for which there was something to draw."""
    return tuple(Drawing(svg, caption, kinds) for svg, caption, kinds in found if svg)


def render_page(page: Page) -> str:
    """The whole document, a pure function of its content; text in it is escaped."""
    loader, strict = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Nothing is loaded, nothing runs, and only this style counts.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return environment.get_template("page.html.jinja").render(page=page, style=style, policy=policy).strip() + "\n"
