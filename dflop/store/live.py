"""The live database: the only door to it, for whoever holds the ingest lock and the lease.

Nobody may `open()` or copy that file inside this process: closing any descriptor of it drops DuckDB's lock (POSIX).
And a COMMIT after a failed statement reports success but commits nothing, hence `transaction`: every error rolls
back and travels on.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from dflop.errors import StoreError
from dflop.store import access, durable, migrate, settings
from dflop.store.lease import Lease, exclusive

Progress = Callable[[str], None]
"""Takes lines about how a long work gets on."""
LOCK_TIMEOUT_S = 60.0
CHECKPOINT_THRESHOLD = "1GiB"
"""Log size that triggers a checkpoint; the default of 16 MiB rewrites the growing tail of a table many times a pass."""
STORAGE_VERSION = "v1.4.0"
"""Storage version of the file and of snapshots, which are copies of it: every duckdb client in use opens it."""
_CONFIG = {"checkpoint_threshold": CHECKPOINT_THRESHOLD, "storage_compatibility_version": STORAGE_VERSION}


def silent(_line: str) -> None:
    """Nobody listens."""


@contextlib.contextmanager
def hold(store_root: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Lease]:
    """Makes this process the store's only ingester: the file lock for this node, the lease for the others."""
    durable.make_folder(store_root)
    _make_live_folder(store_root)
    with exclusive(store_root / "ingest.lock", timeout_s=lock_timeout_s):
        lease_s = settings.read_settings(store_root).lease_s
        with Lease(store_root, lease_s=lease_s, timeout_s=lock_timeout_s) as lease:
            yield lease


@contextlib.contextmanager
def connect(path: Path, say: Progress = silent) -> Iterator[duckdb.DuckDBPyConnection]:
    """Opens a database of a store that is held, read-write, and brings its tables, views and macros up to date."""
    durable.make_folder(path.parent)
    with access.umask_of(path.parent), opened(path, config=_CONFIG) as con:
        with transaction(con):
            for name in migrate.apply(con):
                touch(con)
                say(name)
        _check_version(con, path.parent)
        yield con


@contextlib.contextmanager
def open_live(
    store_root: Path,
    failure: str = "cannot open the store for writing",
    *,
    hint: str = "",
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    say: Progress = silent,
) -> Iterator[tuple[duckdb.DuckDBPyConnection, Lease]]:
    """Holds the store and opens its live database.

    Raises:
        StoreError: See `hold` and `connect`, or the block met an error of DuckDB or of the file system: `failure`.
    """
    with (
        explained(failure, store_root, hint),
        hold(store_root, lock_timeout_s=lock_timeout_s) as lease,
        connect(live_file(store_root), say) as con,
    ):
        yield con, lease


@contextlib.contextmanager
def explained(failure: str, store_root: Path, hint: str = "") -> Iterator[None]:
    """Makes errors of DuckDB and of the file system ones that say what failed, where, and what to do."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        raise access.error_of(failure, error, store_root, hint=hint) from error


def migrate_store(store_root: Path) -> list[str]:
    """Brings the live database to today's tables and views; returns the names of what ran, none when up to date."""
    ran: list[str] = []
    with open_live(store_root, say=ran.append):
        return ran


def live_file(store_root: Path) -> Path:
    """Where the store keeps its live database."""
    return settings.read_settings(store_root).live_file(store_root)


@contextlib.contextmanager
def transaction(con: duckdb.DuckDBPyConnection, lease: Lease | None = None) -> Iterator[None]:
    """Commits the block as a whole, or rolls it back and raises; commits nothing once the lease is lost."""
    con.begin()
    try:
        yield
        if lease:
            lease.check()
        con.commit()
    except BaseException:
        with contextlib.suppress(duckdb.TransactionException):  # a failed commit has already rolled back
            con.rollback()
        raise


@contextlib.contextmanager
def attached(con: duckdb.DuckDBPyConnection, path: Path, name: str, option: str = "read_only") -> Iterator[None]:
    """Attaches another database file under `name` for the duration of the block."""
    quoted = str(path).replace("'", "''")
    con.execute(f"attach '{quoted}' as {name} ({option})")
    try:
        yield
    finally:
        con.execute(f"detach {name}")


def touch(con: duckdb.DuckDBPyConnection) -> str:
    """Gives the content a new identity, in every transaction that changes what readers see; returns it."""
    set_meta(con, "revision", revision := uuid.uuid4().hex)
    return revision


def get_meta(con: duckdb.DuckDBPyConnection, key: str) -> str:
    """Value of a `store_meta` key; empty when it was never set."""
    row = con.execute("select value from store_meta where key = ?", [key]).fetchone()
    return str(row[0]) if row else ""


def set_meta(con: duckdb.DuckDBPyConnection, key: str, value: str) -> None:
    """Sets a `store_meta` key."""
    con.execute("insert or replace into store_meta values (?, ?)", [key, value])


def insert_table(con: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    """Appends Arrow rows to a table, columns matched by name."""
    with registered(con, rows) as incoming:
        con.execute(f'insert into "{name}" by name select * from {incoming}')


@contextlib.contextmanager
def registered(con: duckdb.DuckDBPyConnection, rows: pa.Table) -> Iterator[str]:
    """Makes Arrow rows visible to SQL under the returned name for the duration of the block."""
    con.register("_incoming", rows)
    try:
        yield "_incoming"
    finally:
        con.unregister("_incoming")


def _make_live_folder(store_root: Path) -> None:
    """A live folder on a node's own disk is whose the store is: who ingests here first makes it for all."""
    folder = live_file(store_root).parent
    if folder.is_relative_to(store_root) or folder.exists() or not access.is_shared(store_root):
        return
    found = store_root.stat()
    durable.make_folder(folder)
    os.chown(folder, -1, found.st_gid)
    folder.chmod(found.st_mode & 0o7777)


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[duckdb.DuckDBPyConnection]:
    """Opens a database file; the caller holds the ingest lock.

    Raises:
        StoreError: It is damaged.
    """
    try:
        con = duckdb.connect(str(path), **options)
    except duckdb.Error as error:
        if access.is_denied(error):
            raise  # a rebuild would meet the same; whoever knows the store says whose the file is
        message = f"cannot open the live database: {str(error).splitlines()[0]}"
        raise StoreError(
            message, where=str(path), hint="no data is lost (the spool has it): run `dflop store rebuild`"
        ) from error
    with con:
        yield con


def _check_version(con: duckdb.DuckDBPyConnection, folder: Path) -> None:
    written_by = get_meta(con, "duckdb_version")
    theirs, ours = ([int(part) for part in v.split(".")[:2] if part] for v in (written_by, duckdb.__version__))
    if theirs > ours:
        message = f"the live database was written by duckdb {written_by}, this is {duckdb.__version__}"
        hint = "ingest with the newer duckdb, or run `dflop store rebuild` with this one"
        raise StoreError(message, where=str(folder), hint=hint)
    if written_by != duckdb.__version__:
        set_meta(con, "duckdb_version", duckdb.__version__)
