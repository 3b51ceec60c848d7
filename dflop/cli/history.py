"""`dflop history`: what a run noticed and decided."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import DEFAULT_STORE, Json, Quiet, Store, form_of, talk


def history(
    run: Annotated[str, Parameter(help="Run directory, or the id of a run in --store.")],
    *,
    store: Store = DEFAULT_STORE,
    form: Annotated[Literal["table", "markdown", "json", "csv"], Parameter(name="--format")] = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell in order what a run noticed and what was done about it: plans, corrections, drifts, slow ranks, restarts.

    Rows that wait in the spool are brought in first, unless somebody else is at it. A run directory names its own
    store. Example: dflop history runs/demo-20261120-120000
    """
    from rich.console import Console

    from dflop.jobs.results import load_history
    from dflop.jobs.rundir import open_run
    from dflop.report.history import COLUMNS, history_rows, history_table, markdown_history
    from dflop.report.rows import print_rows
    from dflop.report.terminal import print_table
    from dflop.store.freshen import freshen

    run_id = run
    if Path(run).is_dir():
        opened = open_run(run)
        run_id, store = opened.run_id, opened.config().store
    num_waiting = freshen(store, run_id)
    entries = load_history(store, run_id)
    if num_waiting:
        talk(quiet)(f"{num_waiting} files of the run wait to be ingested: dflop store ingest --store {store}")
    if (shown := form_of(form, as_json)) == "table":
        print_table(history_table(entries), Console())
    elif shown == "markdown":
        sys.stdout.write(markdown_history(entries))
    else:
        print_rows(COLUMNS, history_rows(entries), shown)
