"""Commands that drive runs: with Prefect (`run`, `serve`) and without (`train`)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dflop.cli.common import RUNS, ConfigFile, DryRun, Overrides, Runs, at_least, prepare_kernels
from dflop.cli.configured import show_card
from dflop.run.messages import say

if TYPE_CHECKING:
    from dflop.config import Config
    from dflop.errors import DflopError
    from dflop.run.directory import RunDir

FLOWS = ("pipeline", "profile", "plan", "train", "report")
"""Flows of `flows/pipeline.py` that are served."""


def run(config: ConfigFile, *, overrides: Overrides = (), dry_run: DryRun = False) -> None:
    """Run the whole pipeline of a configuration, or resume its unfinished run.

    Uses the Prefect server of PREFECT_API_URL, or a temporary one; `dflop train` needs none. Ctrl-C cancels its jobs.
    With --dry-run, prints the exact batch scripts to stdout.

    Example: dflop run configs/demo.yaml
    """
    prepare_kernels()
    from dflop.config import load_with_origins
    from dflop.steps.preflight import preflight

    # What cannot run is refused before Prefect is loaded, which makes its folder.
    loaded = load_with_origins(config, overrides)
    preflight(loaded.config, loaded.origins, is_dry=dry_run)
    show_card(loaded.config, say)
    if dry_run:
        _show_dry_run(loaded.config)
        return
    from dflop.cli import server
    from dflop.run.lifecycle import is_finished
    from dflop.run.queue import DRIVER_VARIABLE
    from dflop.steps.session import begun

    server.prepare()
    from prefect.exceptions import Abort

    os.environ[DRIVER_VARIABLE] = str(os.getpid())
    for number in (signal.SIGTERM, signal.SIGHUP):  # by default they would leave a temporary server
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    away: DflopError | None = None
    url = ""
    try:
        if not (url := server.check_server()[0]):
            server.lock_temporary_server()
    except server.ServerAway as error:
        away = error
    driven = begun(loaded.config, say)
    if away is None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Prefect prints there that it polls in vain
                asyncio.run(server.run_pipeline(driven))
        except (Exception, Abort) as error:
            if (away := server.lost_server(error)) is None:
                raise
            if not isinstance(away, server.ServerAway):
                if url:
                    _end_without_server(away)
                raise away from None
    if away is not None:
        say(away.what if is_finished(driven) else f"{away.what}; run {driven.run_id} continues without a page")
    if not is_finished(driven):
        asyncio.run(_drive(driven))
    _tell(driven)
    if away is not None and url:
        _end_without_server(None)


def _end_without_server(error: DflopError | None) -> None:
    """End at once: Prefect would offer its last events for minutes to a server that hangs."""
    if error is not None:
        print(f"dflop: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if error is not None else 0)


def _show_dry_run(config: Config) -> None:
    from dflop.steps.dry_run import dry_run

    found = dry_run(config)
    say(f"would {'resume' if found.is_resumed else 'begin'} run {found.run_id}")
    for note in found.notes:
        say(note)
    print(found.config)
    for job in found.jobs:
        print(f"# {job.script or job.name}\n{job.text}")


def train(
    run: Annotated[str, Parameter(help="Run directory, id, beginning of one, `latest`; or a configuration file.")],
    *,
    overrides: Overrides = (),
    runs: Runs = RUNS,
    overfit: Annotated[
        int | None,
        Parameter(help="Train on so many samples again and again, as run NAME-overfit.", validator=at_least(1)),
    ] = None,
) -> None:
    """Run or resume the pipeline in this process, without Prefect.

    Profile, plan, train, compare, report. With a configuration file, its unfinished run or a new one. Ctrl-C cancels
    the jobs; kill -9 leaves them, and the same command adopts them. `--overfit 8` tries a configuration: under its
    plan the loss of 8 samples must fall, else the command ends with 1; it neither validates nor compares.

    Example: dflop train latest
    """
    prepare_kernels()
    from dflop.config import load_config
    from dflop.errors import ConfigError
    from dflop.run.lifecycle import is_finished
    from dflop.steps.session import finished_text, run_meant
    from dflop.views.overfit import check_overfit, overfit_overrides

    is_file = run.endswith((".yaml", ".yml", ".json")) and not Path(run).is_dir()
    if (overrides or overfit) and not is_file:
        option, value = ("--set", "...") if overrides else ("--overfit", overfit)
        hint = f"dflop train CONFIG {option} {value}"
        raise ConfigError("an existing run keeps its configuration", where=option, hint=hint)
    if overfit:
        overrides = (*overrides, *overfit_overrides(load_config(Path(run), overrides).name, overfit))
    path, name = (run, "") if is_file else ("", run)
    taken_up = run_meant(path=path, overrides=overrides, name=name, folder=runs, say=say)
    if is_finished(taken_up):
        say(finished_text(taken_up))
        return
    asyncio.run(_drive(taken_up))
    _tell(taken_up)
    if overfit:
        say(check_overfit(taken_up))


async def _drive(run: RunDir) -> None:
    from dflop.cli.server import close_left
    from dflop.steps.follow import Listener
    from dflop.steps.session import driver_session, run_to_end

    async with driver_session(run, say):
        why = f"its driver was lost; run {run.run_id} continues without a flow"
        await asyncio.to_thread(close_left, run, "Crashed", why)
        await run_to_end(run, Listener(say))


def serve(
    *,
    name: Annotated[str, Parameter(help="Name of the deployments.")] = "here",
    limit: Annotated[int, Parameter(help="Flow runs at the same time; further ones wait.")] = 1,
    notify: Annotated[
        str, Parameter(help="Block of the server, as slack-webhook/ops, to notify of runs that fail or are abandoned.")
    ] = "",
) -> None:
    """Serve deployments of the flows to a Prefect server, and run them here.

    Start a server first, `prefect server start` in another terminal, and name it here:
    `export PREFECT_API_URL=http://127.0.0.1:4200/api`. A flow without heartbeat is marked as crashed. For a team, with
    workers and schedules, see prefect.yaml and docs/operating.md.

    Example: dflop serve --limit 4
    """
    prepare_kernels()
    from dflop.cli import server
    from dflop.errors import ConfigError

    server.prepare()
    import prefect

    if limit < 1:
        raise ConfigError(f"cannot run {limit} flows at the same time", where="--limit", hint="1 or more")
    url, _ = server.check_server()
    if not url:
        raise ConfigError(
            "PREFECT_API_URL names no Prefect server to serve the flows to",
            where="PREFECT_API_URL",
            hint="prefect server start; then export PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
    deployments: list[Any] = [server.load_flow(flow).to_deployment(name=name, tags=["dflop"]) for flow in FLOWS]
    asyncio.run(server.create_automations(notify))
    say(f"serving {', '.join(f'dflop-{flow}/{name}' for flow in FLOWS)} to {url}; Ctrl-C ends it and cancels its runs")
    prefect.serve(*deployments, limit=limit, print_starting_message=False)


def _tell(run: RunDir) -> None:
    from rich.console import Console

    from dflop.report.terminal import print_summary
    from dflop.views.run_results import load_summary

    print_summary(load_summary(run), Console())
    print(f"report: {run.report_file}", file=sys.stderr)
