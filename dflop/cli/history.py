"""`dflop history`: what a run noticed and decided."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import DEFAULT_STORE, RUNS, Json, Quiet, Runs, Store, form_of, talk

if TYPE_CHECKING:
    from dflop.run.directory import RunDir


def history(
    run: Annotated[str, Parameter(help="Run directory, id, beginning of one, `latest`; or an id in --store.")],
    *,
    runs: Runs = RUNS,
    store: Store = DEFAULT_STORE,
    form: Annotated[
        Literal["table", "markdown", "json", "csv"], Parameter(name="--format", help="How entries are written.")
    ] = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell in order what a run noticed and what was done about it.

    Plans, corrections, drifts, slow ranks, restarts. Rows that wait in the spool are brought in first, unless somebody
    else is at it. A run directory names its own store; --store has runs whose directory is gone, too.

    Example: dflop history latest
    """
    from rich.console import Console

    from dflop.report.history_table import COLUMNS, history_rows, history_table, markdown_history
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table
    from dflop.store.freshen import freshen
    from dflop.views.run_results import load_history

    run_id = run
    if (opened := _directory_of(run, runs)) is not None:
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


def _directory_of(name: str, runs: Path) -> RunDir | None:
    """The run directory that is meant; None: the name is for the store."""
    from dflop.errors import ConfigError
    from dflop.run.directory import open_run
    from dflop.run.find import LATEST, find_run

    if Path(name).is_dir():
        return open_run(name)
    try:
        return find_run(name, runs)
    except ConfigError:
        if name == LATEST:
            raise
        return None
