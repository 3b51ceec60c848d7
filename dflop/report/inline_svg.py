"""matplotlib's SVG as a part of a page: attributes instead of styles, so that the page's policy can forbid styles.

A `style` attribute says nothing that SVG's own attributes cannot say, but for fonts, which the page decides. The style
sheet that matplotlib writes into every drawing would hold for the whole page; what it says goes to the drawing's root.
"""

from __future__ import annotations

import html
import re

ATTRIBUTES = frozenset({
    "fill", "fill-opacity", "font-size", "font-style", "font-weight", "opacity", "stroke", "stroke-dasharray",
    "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "stroke-opacity", "stroke-width", "text-anchor",
})  # fmt: skip
"""Properties that may be attributes as well."""
PAGES_OWN = frozenset({"font-family", "font-stretch", "font-variant"})
"""Properties that are the page's business."""

_SHEET = re.compile(r"<defs>\s*<style[^>]*>(?P<rules>.*?)</style>\s*</defs>", re.DOTALL)
_TAG = re.compile(r"<[a-z][^<>]*>")
_STYLE = re.compile(r'\sstyle="([^"]*)"')
_FONT_SIZE = re.compile(r"(?:^|\s)([\d.]+px)(?:\s|$)")


def without_styles(svg: str) -> str:
    """The same drawing without `style` attributes and style sheets.

    Raises:
        ValueError: a property that no attribute can take the place of.
    """
    svg = _SHEET.sub("", svg, count=1)
    svg = _TAG.sub(lambda tag: _STYLE.sub(_attributes, tag[0]), svg)
    return svg.replace("<svg", '<svg stroke-linejoin="round" stroke-linecap="butt"', 1)


def _attributes(style: re.Match[str]) -> str:
    found: dict[str, str] = {}
    for declaration in html.unescape(style[1]).split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":
            size = _FONT_SIZE.search(value)
            found |= {"font-size": size[1]} if size else {}
        elif name in ATTRIBUTES:
            found[name] = value
        elif name and name not in PAGES_OWN:
            raise ValueError(f"a drawing uses the style `{name}: {value}`, which no attribute can say")
    return "".join(f' {name}="{html.escape(value)}"' for name, value in found.items())
