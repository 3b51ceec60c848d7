"""`dflop runs`: what runs there are, how they and their jobs stand, their logs, and how to be rid of their jobs."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Literal

from cyclopts import App, Parameter

from dflop.cli.common import RUNS, DryRun, Form, Json, Quiet, Run, Runs, form_of, talk
from dflop.errors import printable
from dflop.run.messages import say

app = App(name="runs", help="Runs: state, logs, cancelling. RUN is a directory, an id, or `latest`.")

FOLLOW_S = 1.0


@app.command(name="list")
def list_runs(
    *,
    runs: Runs = RUNS,
    everything: Annotated[
        bool, Parameter(name="--all", help="Include finished runs that only profiled or planned.")
    ] = False,
    form: Form = "table",
    as_json: Json = False,
    parsable: Annotated[bool, Parameter(help="Print only ids.")] = False,
) -> None:
    """List your runs, the newest first.

    `abandoned`: its driver was killed; dflop train RUN resumes it and adopts its jobs. `jobs` are those that have not
    ended, on Slurm or local; a table leaves out columns that are empty for all runs.

    Example: dflop runs list --json
    """
    from dflop.report.rows import print_rows
    from dflop.run.find import left_out_text, look_into
    from dflop.run.status import RUN_COLUMNS, run_rows

    found, left_out = look_into(runs)
    if left_out:
        say(left_out_text(left_out))
    rows = run_rows(found, everything=everything)
    if parsable:
        for row in rows:
            print(row[RUN_COLUMNS.index("run")])
        return
    shown = form_of(form, as_json)
    is_whole = shown != "table" or not rows
    kept = [i for i in range(len(RUN_COLUMNS)) if is_whole or any(row[i] not in ("", None) for row in rows)]
    print_rows([RUN_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows], shown)


@app.command
def show(run: Run = "latest", *, runs: Runs = RUNS, form: Form = "table", as_json: Json = False) -> None:
    """Show the state of a run and of each of its jobs.

    With csv and json, the jobs.

    Example: dflop runs show demo-2026
    """
    from dflop.report.rows import print_rows
    from dflop.run.find import find_run
    from dflop.run.status import JOB_COLUMNS, job_rows, run_facts

    found, shape = find_run(run, runs), form_of(form, as_json)
    if shape == "table":
        facts = {**run_facts(found), "directory": str(found.path), "store": str(found.config().store)}
        for name, value in facts.items():
            print(f"{name:10} {value}")
        print()
    print_rows(JOB_COLUMNS, job_rows(found), shape)


@app.command
def logs(
    run: Run = "latest",
    job: Annotated[
        str, Parameter(help="Name or id of a job (train, data-0), or `scheduler`; default: the newest.")
    ] = "",
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), help="Follow until the job has ended.")] = False,
    rank: Annotated[int, Parameter(help="Rank (task) of the job.")] = 0,
    lines: Annotated[int, Parameter(name=("--lines", "-l"), help="Number of last lines of each log file.")] = 100,
    runs: Runs = RUNS,
) -> None:
    """Print the end of a job's log, and follow it.

    The job's name goes to stderr.

    Example: dflop runs logs latest -f
    """
    from dflop.launch.tail import last_lines, new_lines
    from dflop.run.find import find_run
    from dflop.run.queue import is_over
    from dflop.run.status import log_files

    found = find_run(run, runs)
    view, files = log_files(found, job, rank)
    say(f"{view.name}, {view.handle.backend} {view.handle.job_id}: {view.state}" if view else str(files[0]))
    offsets = {}
    for file in files:
        text, offsets[file] = last_lines(file, lines)
        _print_log(text)
    while follow:
        has_ended = is_over(found, view.handle if view else None)
        for file in files:
            text, offsets[file], _ = new_lines(file, offsets[file])
            _print_log(text)
        if has_ended:
            return
        time.sleep(FOLLOW_S)


def _print_log(text: str) -> None:
    """As it is into files and pipes; on a terminal without what a terminal would obey."""
    print("\r".join(map(printable, text.split("\r"))) if sys.stdout.isatty() else text, end="", flush=True)


@app.command
def script(
    run: Run,
    mode: Annotated[Literal["train", "compare"], Parameter(help="What the script does with the run.")] = "train",
    *,
    runs: Runs = RUNS,
) -> None:
    """Write the batch script that trains a run, for you to submit, and print its path.

    `sbatch $(dflop runs script RUN)` submits it. A run trains in one job at a time: a second one ends with the reason.
    A driver follows the job, or none is needed: it requeues itself before its time limit and resumes from a checkpoint.

    Example: dflop runs script latest
    """
    from dflop.run.find import find_run
    from dflop.steps.dry_run import script_by_hand

    print(script_by_hand(find_run(run, runs), mode))


@app.command
def cancel(run: Run, *, runs: Runs = RUNS, quiet: Quiet = False) -> None:
    """Cancel all jobs of a run and wait until none is left; print their ids.

    Its driver ends by itself. Resume the run with dflop train RUN.

    Example: dflop cancel latest
    """
    from dflop.cli.server import close_left
    from dflop.run.driver_lock import driver_of
    from dflop.run.find import find_run
    from dflop.run.queue import cancel_run

    found, say = find_run(run, runs), talk(quiet)
    cancelled = cancel_run(found, say)
    if driver_of(found) is None:
        close_left(found, "Cancelled", "cancelled by dflop cancel")
    for job_id in cancelled:
        print(job_id)
    say(f"run {found.run_id}: {len(cancelled)} jobs cancelled, none remain")


@app.command
def reap(
    *, runs: Runs = RUNS, dry_run: DryRun = False, form: Form = "table", as_json: Json = False, quiet: Quiet = False
) -> None:
    """Clean up: cancel orphaned jobs and temporary Prefect servers of drivers that are gone.

    A resumed run adopts its jobs: this is for runs that will not be resumed.

    Example: dflop reap --dry-run
    """
    from dflop.launch.process import kill_all
    from dflop.report.rows import print_rows
    from dflop.run import queue

    say = talk(quiet)
    found = queue.reap(runs, say, dry_run=dry_run)
    columns = ("run", "id", "job", "state", "fate")
    print_rows(columns, [(j.run_id, j.job_id, j.name, j.state, fate) for j, fate in found], form_of(form, as_json))
    if servers := queue.servers_left_behind():
        pids = ", ".join(str(process.pid) for process in servers)
        if not dry_run:
            kill_all(servers)
        say(f"temporary Prefect servers without a driver {'would be ended' if dry_run else 'ended'}: {pids}")
