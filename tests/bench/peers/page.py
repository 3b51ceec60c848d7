"""Tables of a result of `python -m tests.bench.peers`: `peers`, a line per peer, and `peers-all`, all rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.markdown import table

Row = dict[str, Any]
SCOPES = {"batch": "global batch", "epoch": "epoch: other batches are learnt", "plan": "plan"}


def tables(content: dict[str, Any]) -> dict[str, str]:
    """`peers` and `peers-all` as Markdown."""
    ran, absent = _summary(content)
    blank = [""] * (len(HEAD) - 5)
    missing = [(r["peer"], r["origin"], SCOPES[r["kind"]], "", f"no result: {r['note']}", *blank) for r in absent]
    return {"peers": table(HEAD, [*ran, *missing]), "peers-all": table(HEAD_ALL, _all(content))}


def text(content: dict[str, Any]) -> str:
    """The summary for a terminal, what it says first, who has no result last."""
    ran, absent = _summary(content)
    rows = [[cell for name, cell in zip(HEAD, row, strict=True) if name != "by"] for row in (HEAD, *ran)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    told = (
        f"{len(content['cells'])} cells, simulated; a peer's seconds over dflop's, below 1 the peer is faster. Where "
        "dflop is not better in every batch comes first."
    )
    return "\n".join([told, *lines, *(f"{row['peer']} ({row['origin']}): no result, {row['note']}" for row in absent)])


def galvatron_row(said: str) -> Row:
    """Galvatron's planner: no cell has it, whatever the import says, and the line says so."""
    why = f"its search engine cannot be imported: {said}" if said else "imports here, but is not driven by this bench"
    return {"kind": "plan", "peer": "planner: Galvatron", "origin": "package hetu-galvatron 2.4.0", "note": why}


HEAD = (
    "peer", "by", "decides within", "count", "mean", "least", "faster / equal", "over memory", "decides in s",
    "dflop in s",
)  # fmt: skip
HEAD_ALL = (
    "peer", "family", "data", "plan of", "count", "mean", "least", "faster / equal", "over memory", "decides in s",
    "note",
)  # fmt: skip


def _rows(content: dict[str, Any]) -> list[Row]:
    return [row for cell in content["cells"] for row in cell["rows"]]


def _summary(content: dict[str, Any]) -> tuple[list[tuple[str, ...]], list[Row]]:
    """A line per peer, over all cells and plans; and a row of each that never ran.

    Of peers that may choose their number of microbatches, only what they make of that.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in _rows(content):
        name = row["peer"] + (", own scheduler" if row["kind"] == "plan" and row["on"] == "own" else "")
        groups.setdefault((name, row["origin"], row["kind"], row["count"]), []).append(row)
    choosing = {key[:3] for key in groups if key[3] == "own"}
    groups = {key: rows for key, rows in groups.items() if key[3] != "plan's" or key[:3] not in choosing}
    ran = {key: rows for key, rows in groups.items() if any(row["ratio"] for row in rows)}
    found = [line for _, line in sorted((_order(rows), _line(key, rows)) for key, rows in ran.items())]
    names = {key[0] for key in ran}
    absent = {key[0]: rows[0] for key, rows in groups.items() if key[0] not in names}
    return found, [*absent.values(), content["galvatron"]]


def _line(key: tuple[str, ...], rows: Sequence[Row]) -> tuple[str, ...]:
    peer, origin, kind, count = key
    ratios = [r for row in rows for r in row["ratio"]]
    decide = [row["decide_s"] for row in rows if _is_number(row["decide_s"])]
    ours = [row["dflop_decide_s"] for row in rows if _is_number(row["dflop_decide_s"])]
    return (
        peer, origin, SCOPES[kind], count, f"{statistics.geometric_mean(ratios):.3f}", f"{min(ratios):.3f}",
        _wins(ratios), _over(rows), _seconds(decide), _seconds(ours),
    )  # fmt: skip


def _all(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every row, those in which dflop is not better in every batch first, by the peer's mean."""
    rows = sorted(_rows(content), key=lambda row: (_order([row]), row["peer"], row["model"], row["data"]))
    found = []
    for row in rows:
        ran = bool(row["ratio"])
        found.append(
            (
                row["peer"], row["model"], row["data"], row["on"], row["count"],
                f"{statistics.geometric_mean(row['ratio']):.3f}" if ran else "-",
                f"{min(row['ratio']):.3f}" if ran else "-", _wins(row["ratio"]) if ran else "-",
                _over([row]) if ran else "-", _seconds([row["decide_s"]] if _is_number(row["decide_s"]) else []),
                row["note"],
            )
        )  # fmt: skip
    return found


def _order(rows: Sequence[Row]) -> tuple[bool, bool, float]:
    """Not run last; first those in which dflop is not better in every batch; then by the peer's mean."""
    ratios = [r for row in rows for r in row["ratio"]]
    if not ratios:
        return True, True, math.inf
    return False, min(ratios) > 1, statistics.geometric_mean(ratios)


def _wins(ratios: Sequence[float]) -> str:
    faster, equal = sum(r < 1 for r in ratios), sum(r == 1 for r in ratios)
    return f"{faster} / {equal} of {len(ratios)}"


def _over(rows: Iterable[Row]) -> str:
    return str(sum(row["num_over_memory"] for row in rows))


def _seconds(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2g}" if found else "-"


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
