"""Tables and numbers as documents want them."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `|` in a cell is escaped, and a cell is one line."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def ratio(value: float) -> str:
    """`1.16x`."""
    return f"{value:.2f}x"


def percent(frac: float) -> str:
    """`12 %`."""
    return f"{100 * frac:.0f} %"


def span(values: Sequence[float], form: str = ".2f") -> str:
    """`0.97 to 1.13`, or one of them where both are written alike."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
