"""Drawings as inline SVG: no files, no scripts, no network, the same bytes for the same values.

Text stays text (selectable, small) and ink becomes `currentColor`, so that one SVG serves light and dark pages. Ids
are prefixed with the drawing's name because several share one HTML document. The page's policy forbids styles, so what
matplotlib says in `style` attributes is written in SVG's own attributes. Colours are from the Okabe-Ito set, which all
common kinds of colour blindness tell apart; hatching, marks and labels repeat what colour says.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dflop.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#56B4E9", "#999999"
SUFFIXES = (".png", ".svg", ".pdf")
"""Suffixes of files that can be drawn."""
TITLE_CHARS_PER_INCH = 12

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
# Alone on a page a drawing brings its page's colours along.
_OWN_PAGE = (
    "<style>svg { color: #1b1f24; background: #ffffff; font-family: sans-serif } "
    "@media (prefers-color-scheme: dark) { svg { color: #e6e8ea; background: #14171a } }</style>"
)
_SHEET = re.compile(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", re.DOTALL)
_STYLE = re.compile(r'(<[a-z][^<>]*?)\sstyle="([^"]*)"')
_FONT_SIZE = re.compile(r"(?:^|\s)([\d.]+px)(?:\s|$)")
_PATH = re.compile(r"(<path\b[^>]*)/>")


@dataclass(frozen=True, slots=True)
class Picture:
    """Something drawn: for a page, or as a file."""

    name: str
    """Unlike those of all others of the page."""
    label: str
    """What it shows, for those who cannot see it."""
    size: tuple[float, float]
    """Width and height in inches."""
    draw: Callable[[Figure], Mapping[str, Sequence[str]] | None]
    """Draws; may return, by the `gid` of a collection, what a page tells of each of its paths when pointed at."""

    def svg(self, title: str = "") -> str:
        """One `<svg class="plot">`, as wide as its size says at 96 px an inch.

        Raises:
            ValueError: a style that no attribute can take the place of.
        """
        out = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        hints = self._draw_into(out, title, format="svg", transparent=True, metadata=no_metadata)
        svg = out.getvalue()
        svg = _SHEET.sub("", svg[svg.index("<svg") :].strip().replace(INK, "currentColor"), count=1)
        for gid, of_paths in hints.items():
            svg = _with_titles(svg, gid, of_paths)
        svg = _STYLE.sub(lambda found: found[1] + _attributes(found[2]), svg)
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", svg)
        # Height follows from the width, which the page may make smaller.
        opening, rest = svg.split(">", 1)
        opening = re.sub(r' (width|height)="[^"]*"', "", opening)
        about = f'class="plot" role="img" aria-label="{html.escape(self.label)}" width="{96 * self.size[0]:.0f}"'
        return f'{opening} stroke-linejoin="round" stroke-linecap="butt" {about}>{rest}'

    def save(self, path: Path, title: str) -> None:
        """Writes a .png, a .pdf, or an .svg that is light or dark as its reader's screen is, under a title.

        Raises:
            ConfigError: the suffix of the path is none that can be drawn.
            OSError: the file cannot be written.
        """
        check_suffix(path)
        if path.suffix.lower() == ".svg":
            opening, rest = self.svg(title).split(">", 1)
            path.write_text(f"{opening}>{_OWN_PAGE}{rest}\n", encoding="utf-8")
        else:
            self._draw_into(path, title, dpi=125)

    def _draw_into(self, out: Path | io.StringIO, title: str, **how: Any) -> Mapping[str, Sequence[str]]:
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": self.name}):
            figure = Figure(figsize=self.size, layout="constrained")
            if title:
                figure.suptitle(textwrap.fill(title, int(TITLE_CHARS_PER_INCH * self.size[0])), fontsize=10)
            hints = self.draw(figure)
            figure.savefig(out, **how)
        return hints or {}


def tell_ticks(axis: Axis, text: Callable[[float], str]) -> None:
    """Ticks of an axis say what `text` makes of their values; those between say nothing."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, found: Mapping[str, Artist] | None = None, **how: Any) -> None:
    """One legend below all diagrams, a name once however many have it."""
    if found is None:
        found = {}
        for axes in figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            found |= dict(zip(labels, handles, strict=True))
    how = {"ncols": max(1, len(found)), "fontsize": 9} | how
    figure.legend(list(found.values()), list(found), loc="outside lower center", **how)


def check_suffix(path: Path) -> None:
    """Refuses what cannot be drawn, before anything is computed.

    Raises:
        ConfigError: the suffix is none of `SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"cannot draw a `{path.suffix}` file", where=str(path), hint=f"valid: {', '.join(SUFFIXES)}")


def _with_titles(svg: str, gid: str, titles: Sequence[str]) -> str:
    """SVG's own way to tell something of what is pointed at: a `<title>` in each path of a group."""
    start = svg.index(f'<g id="{gid}">')
    end = svg.index("</g>", start)
    of_paths = iter(titles)
    titled = _PATH.sub(lambda path: f"{path[1]}><title>{html.escape(next(of_paths))}</title></path>", svg[start:end])
    return svg[:start] + titled + svg[end:]


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
