"""The page of a run of `evidence`: `python -m tests.gpu.page FOLDER` writes it again.

Hardware, versions, commit and command, how every part ended, every row, and what the data sheet predicted beside what
was measured.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop.cost.devices import Device
from tests.gpu.layers import sheet_of

Row = Mapping[str, Any]
MOST_ROWS, MOST_LETTERS = 90, 90
"""Of a table, and of a cell: the rest is in `rows.jsonl`."""


def write(folder: Path) -> None:
    """`page.md` of what is in the folder so far."""
    (folder / "page.md").write_text(text(folder))


def text(folder: Path) -> str:
    facts = json.loads((folder / "circumstances.json").read_text())
    rows, outcomes = defaultdict[str, list[Row]](list), dict[str, Row]()
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "outcome" in row:
            outcomes[row["part"]] = row
        else:
            rows[row.pop("part")].append(row)
    device = facts["hardware"]
    title = "CPU rehearsal: its figures mean nothing" if device.startswith("cpu") else device
    found = [f"# Evidence: {title}", "", table(["", ""], [[key, value] for key, value in facts.items()])]
    found += ["", "## Parts", "", table(["part", "ended", "s", "rows", "of these with an error", "why"], [
        [name, row["outcome"], round(row.get("wall_s", 0.0), 1), len(rows[name]),
         sum(bool(r.get("error")) for r in rows[name]), row.get("why", " / ".join(row.get("last", [])[-2:]))]
        for name, row in outcomes.items()
    ])]  # fmt: skip
    if beside := list(terms(rows, sheet_of(device))):
        found += ["", "## Predicted and measured", "", f"Data sheet: {sheet_of(device).name}.", ""]
        found.append(table(["term", "sheet", "measured", "measured / sheet", "rows"], beside))
    for name, of_part in rows.items():
        found += ["", f"## {name}", "", rows_table(of_part)]
    return "\n".join(found) + "\n"


def terms(rows: Mapping[str, Sequence[Row]], sheet: Device) -> Iterable[Sequence[Any]]:
    """Term by term what the sheet says and what was measured: medians over rows of either."""
    timed = [r for r in rows.get("tables", ()) if r.get("status") == "ok"]
    for module in dict.fromkeys(r["module"] for r in timed):
        for phase in ("forward_s", "backward_s", "activation_bytes"):
            pairs = [(r[f"sheet_{phase}"], r[phase]) for r in timed if r["module"] == module and r[phase]]
            yield from _term(f"{module} layers, {phase}", pairs)
    roofline = rows.get("roofline", ())
    reached = sheet.matmul_frac * sheet.peak_bf16_flops
    largest = max((r["rows"] for r in roofline if "matmul" in r), default=0)
    yield from _term("matmuls, FLOP/s", [(reached, r["flops_per_s"]) for r in roofline if r.get("rows") == largest])
    yield from _term("copy, bytes/s", [(sheet.memory_bytes_per_s, r["bytes_per_s"]) for r in roofline if "copy" in r])
    yield from _term("activations of the largest microbatch, bytes", [
        (r["sheet_bytes"], r["peak_bytes"] - kept["peak_bytes"])
        for kept in rows.get("offload", ())[1:2] for r in rows["offload"][:1] if r["peak_bytes"]
    ])  # fmt: skip


def _term(name: str, pairs: Sequence[tuple[float, float]]) -> Iterable[Sequence[Any]]:
    if pairs:
        ratio = statistics.median(found / said for said, found in pairs if said)
        said, found = (statistics.median(pair[n] for pair in pairs) for n in (0, 1))
        yield name, said, found, f"{ratio:.2f}", len(pairs)


def rows_table(rows: Sequence[Row]) -> str:
    """Rows with the same columns below one another; `MOST_ROWS` at most."""
    by_columns = defaultdict[tuple[str, ...], list[Row]](list)
    for row in rows[:MOST_ROWS]:
        by_columns[tuple(row)].append(row)
    tables = [table(columns, [list(row.values()) for row in of]) for columns, of in by_columns.items()]
    if len(rows) > MOST_ROWS:
        tables.append(f"{len(rows) - MOST_ROWS} more in `rows.jsonl`.")
    return "\n\n".join(tables)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    shown = shown.replace("|", "\\|").replace("\n", " ")
    return shown if len(shown) <= MOST_LETTERS else shown[:MOST_LETTERS] + " ..."


if __name__ == "__main__":
    write(Path(sys.argv[1]))
