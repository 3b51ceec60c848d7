"""`dflop store`: what keeps the profile store."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dflop import units
from dflop.cli.common import DEFAULT_STORE, DryRun, Json, Quiet, Store, at_least, talk

app = App(name="store", help="The store: one writer, read-only snapshots for all readers.")


@app.command
def init(
    *,
    store: Store = DEFAULT_STORE,
    live: Path | None = None,
    keep_snapshots: int | None = None,
    grace_s: float | None = None,
    max_snapshots_ratio: float | None = None,
    lease_s: float | None = None,
    group: str | None = None,
) -> None:
    """Create a store, or change its settings.

    The first profile also creates one. For a team: --group, whose members may then write.

    Example: dflop store init --live /local/dflop --keep-snapshots 10

    Args:
        store: Folder of the store.
        live: Folder for the live database on a node's own disk; every node that ingests builds its own there.
        keep_snapshots: Newest snapshots that are always kept.
        grace_s: Of older snapshots, those in use and one per sixth of this time are kept until they were replaced so
            long ago; longer than the longest query.
        max_snapshots_ratio: Size of all snapshots over that of the newest at which older ones go sooner.
        lease_s: Seconds without heartbeat after which an ingester on another node counts as dead.
        group: Group whose members may write, read and clean the store.
    """
    from dflop.store import access, settings
    from dflop.store import live as live_module

    found = settings.init(
        store, live=live, keep_snapshots=keep_snapshots, grace_s=grace_s,
        max_snapshots_ratio=max_snapshots_ratio, lease_s=lease_s, group=group,
    )  # fmt: skip
    live_module.migrate_store(store)
    if group is not None and (problem := access.obstacle(store)):
        talk(quiet=False)(problem)
    print(f"{store}: {found}")


@app.command
def migrate(*, store: Store = DEFAULT_STORE) -> None:
    """Migrate the live database to this version's tables and views; every ingest does so, too.

    Example: dflop store migrate
    """
    from dflop.store import live

    _refuse_missing(store)
    ran = live.migrate_store(store)
    print("\n".join(ran) or "up to date")


@app.command
def ingest(
    *,
    store: Store = DEFAULT_STORE,
    watch: Annotated[bool, Parameter(help="Repeat until interrupted; the current pass finishes.")] = False,
    interval_s: Annotated[float, Parameter(help="Seconds between passes.", validator=at_least(0.001))] = 30.0,
    parsable: Annotated[bool, Parameter(help="Print only the number of the snapshot.")] = False,
    quiet: Quiet = False,
) -> None:
    """Ingest all spooled rows into the database and publish a snapshot.

    Example: dflop store ingest --watch
    """
    from dflop.store import ingest as ingest_module

    say = talk(quiet)
    if watch:
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        say(f"watching {store}, every {units.seconds(interval_s)}; Ctrl-C to end")
        num_passes = ingest_module.watch(store, interval_s=interval_s, stop=stop, say=say)
        print(f"{num_passes} passes")
        return
    done = ingest_module.ingest(store, say)
    summary = f"snapshot {done.snapshot_seq}: {done.num_rows} rows of {done.num_files} files"
    print(done.snapshot_seq if parsable else summary)
    for num_files, text in (
        (done.num_quarantined_files, f"bad files were moved to {store}/quarantine; see dflop sql quarantine"),
        (done.num_newer_files, "files need a newer dflop"),
        (done.num_unreadable, "files or folders cannot be read and are kept in the spool; see the lines above"),
    ):
        if num_files:
            say(f"{num_files} {text}")


@app.command
def verify(*, store: Store = DEFAULT_STORE, quiet: Quiet = False) -> None:
    """Verify that database, snapshot and files agree.

    Rebuilds everything from the files and compares. Takes the time and disk space of a rebuild. Exit code 1 when
    something differs.

    Example: dflop store verify
    """
    from dflop.store.rebuild import verify as run_verify

    _refuse_missing(store)
    say = talk(quiet)
    report = run_verify(store, say)
    for problem in report.problems:
        print(problem)
    say(f"compared {report.num_rows} rows of {report.num_files} files in {units.seconds(report.elapsed_s)}")
    if report.problems:
        say("if the files are right, `dflop store rebuild` rebuilds the database")
        raise SystemExit(1)
    print("ok")


@app.command
def rebuild(
    *,
    store: Store = DEFAULT_STORE,
    snapshot: Annotated[int | None, Parameter(help="Rebuild this snapshot into --output instead.")] = None,
    output: Annotated[Path | None, Parameter(help="Output file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Rebuild the live database, or any past snapshot, from the files.

    A snapshot goes to --output.

    Example: dflop store rebuild --snapshot 17 --output june.duckdb
    """
    from dflop.errors import ConfigError
    from dflop.store import rebuild as rebuild_module

    _refuse_missing(store)
    if (snapshot is None) != (output is None):
        raise ConfigError(
            "--snapshot and --output go together", hint="dflop store rebuild --snapshot 17 --output a.duckdb"
        )
    if snapshot is not None and output is not None:
        report = rebuild_module.rebuild_snapshot(store, snapshot, output, talk(quiet))
        made = f"{output}: snapshot {snapshot},"
    else:
        report = rebuild_module.rebuild(store, talk(quiet))
        made = f"snapshot {report.snapshot_seq}:"
    print(f"{made} {report.num_rows} rows of {report.num_files} files")


@app.command
def compact(
    *,
    store: Store = DEFAULT_STORE,
    min_files: Annotated[int, Parameter(help="Skip kinds of a run with fewer files.", validator=at_least(1))] = 16,
    min_age_h: Annotated[
        float, Parameter(help="Skip files younger than this, in hours.", validator=at_least(0))
    ] = 24.0,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Merge the many small spool files of runs into few. Rows and rebuilds stay the same.

    Example: dflop store compact --dry-run
    """
    from dflop.store.maintenance import compact as run_compact

    _refuse_missing(store)
    done = run_compact(store, min_files=min_files, min_age_s=3600 * min_age_h, dry_run=dry_run, say=talk(quiet))
    saved = f", {units.num_bytes(done.num_bytes_before)} became {units.num_bytes(done.num_bytes_after)}"
    would, saved = ("would become", "") if dry_run else ("became", saved)
    print(f"{done.num_files_before} files of {done.num_runs} runs {would} {done.num_files_after}{saved}")


@app.command
def gc(*, store: Store = DEFAULT_STORE, dry_run: DryRun = False, quiet: Quiet = False) -> None:
    """Remove replaced snapshots after their grace period, and leftovers of killed processes.

    Example: dflop store gc --dry-run
    """
    from dflop.store import health
    from dflop.store.maintenance import gc as run_gc

    _refuse_missing(store)
    done = run_gc(store, dry_run=dry_run, say=talk(quiet))
    would = "would be removed" if dry_run else "removed"
    print(f"{len(done)} files, {units.num_bytes(sum(done.values()))}, {would}")
    talk(quiet)(health.room_of_snapshots(store))


@app.command
def status(*, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Show the newest snapshot, its contents, and files not ingested yet.

    With --json one object: the snapshot, the waiting files and the settings.

    Example: dflop store status
    """
    import dataclasses
    import json
    import time

    from dflop.report.rows import print_rows
    from dflop.store import access, console, health, retention, settings, snapshot

    current = snapshot.read_current(store)
    columns, rows = console.query(store, console.named_query("store").sql)
    waiting, rules = health.waiting_files(store), settings.read_settings(store)
    if as_json:
        content = {
            "snapshot": dataclasses.asdict(current) if current else None,
            "num_waiting_files": len(waiting),
            "snapshots": {path.name: path.stat().st_size for path in retention.snapshots(store).values()},
            "kinds": [dict(zip(columns, row, strict=True)) for row in rows],
            "settings": dataclasses.asdict(rules),
        }
        print(json.dumps(content, default=str))
        return
    print_rows(columns, rows, "table")
    if current:
        age_s = time.time() - current.published_at_s
        print(f"snapshot {current.seq}, {units.seconds(age_s)} old, by duckdb {current.duckdb}")
    print(health.room_of_snapshots(store))
    print(f"{len(waiting)} spool files not ingested yet")
    if access.is_shared(store):
        print(f"members of group {access.group_name(store.stat().st_gid)} may write")
    print(rules)


def _refuse_missing(store: Path) -> None:
    from dflop.errors import StoreError

    if not store.is_dir():
        hint = "name it with --store or DFLOP_STORE; the first profile or `dflop store init` creates one"
        raise StoreError("no store", where=str(store), hint=hint)
