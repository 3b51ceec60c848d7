"""`dflop trace`: what every process did, predicted beside measured, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import RUNS, Quiet, Run, Runs, check_folder, talk, writing


def trace(
    run: Run = "latest",
    *,
    runs: Runs = RUNS,
    steps: Annotated[
        str | None, Parameter(help="A:B, steps from A up to but not including B, from 0; default: the last 20.")
    ] = None,
    job: Annotated[Literal["train", "compare"], Parameter(help="Training, or its comparison.")] = "train",
    out: Annotated[Path | None, Parameter(help=".json or .json.gz; default: trace.json in the run directory.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write steps of a run as a Chrome trace, predicted beside measured.

    Open it in ui.perfetto.dev.

    Example: dflop trace latest --steps 10:20
    """
    from dflop import units
    from dflop.run.find import find_run
    from dflop.store.freshen import freshen
    from dflop.views.trace_window import MANY_EVENTS, write_trace

    check_folder(out)
    found, say = find_run(run, runs), talk(quiet)
    store = found.config().store
    if num_waiting := freshen(store, found.run_id):
        say(f"{num_waiting} files of the run wait to be ingested: dflop store ingest --store {store}")
    with writing(out or found.path / "trace.json"):
        made = write_trace(found, out, job=job, window=steps)
    say(
        f"steps {made.first_step} to {made.last_step}: {made.num_steps} measured, {made.num_predicted} also predicted; "
        f"{made.num_events} events, {units.num_bytes(made.num_bytes)}"
    )
    if made.num_events > MANY_EVENTS:
        say("viewers become slow with so many events: name fewer steps with --steps")
    print(made.path)
