"""The command line. A body is a few lines, and heavy imports stay inside it: `dflop --help` must be instant."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from dflop import __version__
from dflop.errors import DflopError

app = App(name="dflop", version=__version__, help="Data-aware training of multimodal LLMs on Slurm clusters.")
store_app = App(name="store", help="The profile store: one writer, snapshots for everybody else.")
app.command(store_app)

Overrides = Annotated[tuple[str, ...], Parameter(name="--set", help="Override a key, e.g. --set train.num_steps=20.")]
Store = Annotated[Path, Parameter(help="Folder of the store.", env_var="DFLOP_STORE")]

_PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    # A temporary server needs up to half a minute on a busy login node.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s %(task_run_name)s: %(message)s",
}


@app.command
def run(config: Path, *, overrides: Overrides = ()) -> None:
    """Run the whole pipeline of a configuration, or go on with an unfinished run of it.

    Uses the Prefect server of PREFECT_API_URL, or a temporary one. Example: dflop run configs/demo.yaml
    """
    from dflop.config import load_config
    from dflop.jobs import runs
    from dflop.jobs.preflight import preflight

    loaded = load_config(config, overrides)
    preflight(loaded, config)
    runs.check_free(loaded)
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import asyncio

    from prefect.flows import load_flow_from_entrypoint
    from rich.console import Console

    from dflop import resources
    from dflop.jobs.results import load_summary
    from dflop.jobs.rundir import open_run
    from dflop.report.terminal import print_summary

    flow: Any = load_flow_from_entrypoint(
        f"{resources.path('flows') / 'pipeline.py'}:pipeline", use_placeholder_flow=False
    )
    finished = open_run(asyncio.run(flow(str(config), list(overrides))))
    print_summary(load_summary(finished), Console())
    print(f"report: {finished.report_file}", file=sys.stderr)


@app.command
def demo_data(folder: Path, *, num_samples: int = 320, seed: int = 0) -> None:
    """Build the demo dataset from media that ship inside Python packages. Example: dflop demo-data data/demo."""
    from dflop.data.demo import make_demo_dataset

    made = make_demo_dataset(folder, num_samples, seed, progress=_say)
    print(made.annotations)


@app.command
def report(run_dir: Path) -> None:
    """Write report.html of a run again, from what the store knows now.

    Example: dflop report runs/demo-20261120-120000
    """
    from rich.console import Console

    from dflop.jobs.results import write_report
    from dflop.jobs.rundir import open_run
    from dflop.report.terminal import print_summary

    opened = open_run(run_dir)
    print_summary(write_report(opened), Console())
    print(opened.report_file)


@app.command
def sql(
    query: str = "",
    *,
    store: Store = Path(".dflop/store"),
    param: tuple[str, ...] = (),
    output: Literal["table", "csv", "json"] = "table",
    list_queries: Annotated[bool, Parameter(name="--list")] = False,
) -> None:
    """Ask the store, read-only: a SELECT, or the name of a query in sql/queries.

    Example: dflop sql "select * from v_run_summary"

    Args:
        query: SQL text, or the name of a query that `--list` shows.
        store: Folder of the store.
        param: name=value for queries with parameters.
        output: Form of the result.
        list_queries: Show the named queries.
    """
    from dflop.report.rows import print_rows
    from dflop.store import console

    if list_queries:
        rows = [(q.name, q.purpose, " ".join(q.parameter_names)) for q in console.list_queries()]
        print_rows(("name", "purpose", "parameters"), rows, output)
        return
    text = query if any(c.isspace() for c in query.strip()) else console.named_query(query).sql
    values = dict(p.partition("=")[::2] for p in param)
    columns, found = console.query(store, text, values or None)
    print_rows(columns, found, output)


@store_app.command
def ingest(*, store: Store = Path(".dflop/store")) -> None:
    """Bring everything the jobs spooled into the database and publish a snapshot. Example: dflop store ingest."""
    from dflop.store.ingest import ingest as run_ingest

    done = run_ingest(store, _say)
    print(f"snapshot {done.snapshot_seq}: {done.num_rows} rows of {done.num_files} files")
    if done.num_quarantined_files:
        _say(f"{done.num_quarantined_files} bad files were moved to {store}/quarantine; see table file_quarantine")


@app.command
def config(path: Path, *, overrides: Overrides = ()) -> None:
    """Show a configuration with every default filled in. Example: dflop config configs/demo.yaml."""
    from dflop.config import dump_config, load_config

    print(dump_config(load_config(path, overrides)), end="")


def main() -> None:
    """Entry point: turns errors into three lines and an exit code."""
    try:
        app(sys.argv[1:])
    except DflopError as error:
        print(f"dflop: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
