"""dflop beside its peers on the same global batches: `python -m tests.bench.peers [--sizes TABLE] [--json FILE]`.

Families x mixtures, on simulated nodes of 8 A100 (two, or four for the largest model) with costs of their data sheet.
Batchers keep the global batch and get the same plan, dflop's and the tuned uniform one; each runs with that plan's
number of microbatches and with the number that turns out best for it on the very batches it is judged on. So does dflop
on the uniform plan, while it keeps to the number of its own. Memory's token caps are the same for all; who exceeds them
is told. Peers that deal over the epoch get the same samples in as many steps; they change what is learnt. Planners get
the same problems and scheduler. A ratio is a peer's simulated seconds over dflop's: below 1 the peer is faster. With
--json a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dflop.records import LLM, ModuleSpec
from dflop.schedule.warm import warm
from tests.bench.figures import machine
from tests.bench.peers.cases import Cell, cells
from tests.bench.peers.contest import Settings, run_cell
from tests.bench.peers.packages import FlatFlow, batch_rebalance, galvatron_import, random_order
from tests.bench.peers.page import galvatron_row, text

QUICK, FULL = Settings(5, 3.0, 1), Settings(10, 10.0, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated data alone without")
    parser.add_argument("--media", type=Path, help="not used: shapes are all that peers look at")
    parser.add_argument("--full", action="store_true", help="more families, mixtures, batches, and time for CP-SAT")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--cells", nargs="+", metavar="TEXT", help="only cells whose name contains one of these")
    args = parser.parse_args()
    if args.sizes and not args.sizes.is_file():
        parser.error(f"no table of sizes at {args.sizes}")
    settings = FULL if args.full else QUICK
    wanted = [c for c in cells(args.sizes, is_full=args.full) if _is_wanted(c, args.cells)]
    if not wanted:
        parser.error(f"no cell is called {' or '.join(args.cells)}")
    content = _begun(args.json, {**asdict(settings), "real_sizes": args.sizes is not None, "full": args.full})
    run(wanted, settings, content, args.json)
    print(text(content))


def run(wanted: list[Cell], settings: Settings, content: dict[str, Any], path: Path | None) -> None:
    """Adds every cell that `content` lacks, and writes it after each."""
    started = time.perf_counter()
    warm()
    random_order(2, 0)  # so that no peer's first decision pays for importing its package
    batch_rebalance(np.array([2, 1]), 1, 1)
    content["galvatron"] = galvatron_row(galvatron_import())
    models = list(dict.fromkeys(c.model for c in wanted))
    done = {(c["model"], c["data"]) for c in content["cells"]}
    for model in models:
        mine = [c for c in wanted if c.model == model and (model, c.data.name) not in done]
        if not mine:
            continue
        llm = next(s for s in mine[0].problem(1)[0].specs if s.module == LLM)
        with _flatflow(llm) as flatflow:
            for cell in mine:
                content["cells"].append(run_cell(cell, settings, flatflow, _tell))
                num_done = len(content["cells"])
                _tell(f"{num_done} of {len(wanted)} cells, {time.perf_counter() - started:.0f} s")
                _write(path, content)
    _write(path, content)


@contextlib.contextmanager
def _flatflow(llm: ModuleSpec) -> Iterator[FlatFlow | str]:
    """The package, or why it does not run."""
    try:
        client = FlatFlow(llm)
    except RuntimeError as error:
        yield str(error)
        return
    with client:
        yield client


def _is_wanted(cell: Cell, names: list[str] | None) -> bool:
    return not names or any(name.lower() in cell.name.lower() for name in names)


def _begun(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What is in the file already, if it is of the same settings; else nothing yet."""
    told = machine("numpy", "numba", "torch", "transformers")
    if path and path.is_file():
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(path.read_text())
            is_same = {k: v for k, v in found.get("machine", {}).items() if k != "date"} == {
                k: v for k, v in told.items() if k != "date"
            }
            if found.get("settings") == settings and is_same:
                _tell(f"goes on behind {len(found['cells'])} cells of {path}")
                found["num_parts"] = found.get("num_parts", 1) + 1
                return found
    return {"machine": told, "settings": settings, "num_parts": 1, "simulated": True, "cells": []}


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(part, path)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
