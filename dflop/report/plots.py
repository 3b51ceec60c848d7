"""Drawings as inline SVG: no files, no scripts, no network, the same bytes for the same values.

Text stays text (selectable, small) and ink becomes `currentColor`, so that one SVG serves light and dark pages. Ids
are prefixed with the drawing's name because several share one HTML document. The page's policy forbids styles, so what
matplotlib says in `style` attributes is said in SVG's own attributes. Colours are from the Okabe-Ito set, which all
common kinds of colour blindness tell apart; hatching, marks and labels repeat what colour says.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from dflop.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#56B4E9", "#999999"
SUFFIXES = (".png", ".svg", ".pdf")
"""Of files that can be drawn."""

INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
STYLE: dict[RcKeyType, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.alpha": 0.2,
    "grid.color": INK,
    "hatch.color": BLUE,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
PAGES_OWN = frozenset({"font-family", "font-stretch", "font-variant"})
"""Properties that are the page's business."""
# On a page of its own a drawing brings its page's colours along.
_OWN_PAGE = (
    "<style>svg { color: #1b1f24; background: #ffffff; font-family: sans-serif } "
    "@media (prefers-color-scheme: dark) { svg { color: #e6e8ea; background: #14171a } }</style>"
)
_SHEET = re.compile(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", re.DOTALL)
_STYLE = re.compile(r'(<[a-z][^<>]*?)\sstyle="([^"]*)"')
_FONT_SIZE = re.compile(r"(?:^|\s)([\d.]+px)(?:\s|$)")
_PATH = re.compile(r"(<path\b[^>]*)/>")


class Hints(dict[str, Sequence[str]]):
    """By the `gid` of a collection what a page tells of each of its paths when it is pointed at."""


def check_suffix(path: Path) -> None:
    """Refuses what cannot be drawn, before anything is computed.

    Raises:
        ConfigError: the suffix is none of `SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"cannot draw a `{path.suffix}` file", where=str(path), hint=f"valid: {', '.join(SUFFIXES)}")


def svg_text(
    name: str, label: str, size: tuple[float, float], draw: Callable[[Figure], None], hints: Mapping[str, Any] = {}
) -> str:
    """Runs `draw` on a figure of `size` inches and returns one `<svg class="plot">`, as wide as that at 96 px an inch.

    Args:
        name: Of the drawing, unlike all others of the page.
        label: What it shows, for those who cannot see it.
        size: Width and height.
        draw: Draws, and fills `hints`.
        hints: See `Hints`.

    Raises:
        ValueError: a style that no attribute can take the place of.
    """
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    svg = out.getvalue()
    svg = _SHEET.sub("", svg[svg.index("<svg") :].strip().replace(INK, "currentColor"), count=1)
    for gid, of_paths in hints.items():
        svg = _with_titles(svg, gid, of_paths)
    svg = _STYLE.sub(lambda found: found[1] + _attributes(found[2]), svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    # Height follows from the width, which the page may make smaller.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    about = f'class="plot" role="img" aria-label="{html.escape(label)}" width="{96 * size[0]:.0f}"'
    return f'{opening} stroke-linejoin="round" stroke-linecap="butt" {about}>{rest}'


def save_drawing(path: Path, name: str, label: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """The same as a file of its own: .png and .pdf, or an .svg that is light or dark as its reader's screen is.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    if path.suffix.lower() == ".svg":
        opening, rest = svg_text(name, label, size, draw).split(">", 1)
        path.write_text(f"{opening}>{_OWN_PAGE}{rest}\n", encoding="utf-8")
        return
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(path, dpi=125)


def _with_titles(svg: str, gid: str, titles: Sequence[str]) -> str:
    """SVG's own way to tell something of what is pointed at: a `<title>` in each path of a group."""
    start = svg.index(f'<g id="{gid}">')
    end = svg.index("</g>", start)
    of_paths = iter(titles)
    told = _PATH.sub(lambda path: f"{path[1]}><title>{html.escape(next(of_paths))}</title></path>", svg[start:end])
    return svg[:start] + told + svg[end:]


def _attributes(style: str) -> str:
    found: dict[str, str] = {}
    for declaration in html.unescape(style).split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":
            size = _FONT_SIZE.search(value)
            found |= {"font-size": size[1]} if size else {}
        elif name and name not in PAGES_OWN:
            if not re.fullmatch(r"(fill|stroke|opacity|font|text-anchor)[a-z-]*", name):
                raise ValueError(f"a drawing uses the style `{name}: {value}`, which no attribute can say")
            found[name] = value
    return "".join(f' {name}="{html.escape(value)}"' for name, value in found.items())
