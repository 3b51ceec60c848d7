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
from dflop.store import access, durable, lock, migrate, settings, sharing
from dflop.store.lease import Lease

Progress = Callable[[str], None]
"""Takes lines about how a long work gets on."""
LOCK_TIMEOUT_S = 60.0
CHECKPOINT_THRESHOLD = "1GiB"
"""Log size that triggers a checkpoint; the default of 16 MiB rewrites the growing tail of a table many times a pass."""
STORAGE_VERSION = "v1.4.0"
"""Of the file, and so of snapshots, which are copies of it: every duckdb client in use opens it."""
_CANNOT_OPEN = "cannot open the store for writing"
_CONFIG: dict[str, Any] = {
    "checkpoint_threshold": CHECKPOINT_THRESHOLD,
    "storage_compatibility_version": STORAGE_VERSION,
}


def silent(_line: str) -> None:
    """Nobody listens."""


@contextlib.contextmanager
def hold(store_root: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Lease]:
    """Makes this process the store's only ingester: the file lock for this node, the lease for the others.

    Raises:
        StoreError: Another process or node is ingesting and does not finish in time.
        OSError: This user may not write in the store.
    """
    durable.make_folder(store_root)
    _make_live_folder(store_root)
    with lock.exclusive(store_root / "ingest.lock", timeout_s=lock_timeout_s):
        lease_s = settings.read_settings(store_root).lease_s
        with Lease(store_root, lease_s=lease_s, timeout_s=lock_timeout_s) as lease:
            yield lease


@contextlib.contextmanager
def connect(path: Path, say: Progress = silent) -> Iterator[duckdb.DuckDBPyConnection]:
    """Opens a database file of the store read-write and brings its tables, views and macros up to date.

    The caller holds the store (`hold`). `say` is called with the name of every migration that ran.

    Raises:
        StoreError: Damaged, or written by a newer duckdb or a newer dflop.
        duckdb.IOException: This user may not write it.
    """
    durable.make_folder(path.parent)
    with sharing.umask_of(path.parent), contextlib.ExitStack() as stack:
        with _damage_explained(path):
            con = stack.enter_context(duckdb.connect(str(path), config=_CONFIG))
        with transaction(con):
            for name in migrate.apply(con):
                touch(con)
                say(name)
        _check_version(con, path.parent)
        yield con


@contextlib.contextmanager
def open_live(
    store_root: Path, failure: str = _CANNOT_OPEN, *, hint: str = "", lock_timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[tuple[duckdb.DuckDBPyConnection, Lease]]:
    """Holds the store and opens its live database.

    Args:
        store_root: Folder of the store.
        failure: What has failed where the block meets an error of DuckDB or of the file system.
        hint: What to do then.
        lock_timeout_s: How long to wait for another ingester.

    Raises:
        StoreError: See `hold` and `connect`, or the block met such an error.
    """
    with (
        explained(failure, store_root, hint),
        hold(store_root, lock_timeout_s=lock_timeout_s) as lease,
        connect(live_file(store_root)) as con,
    ):
        yield con, lease


@contextlib.contextmanager
def explained(failure: str, store_root: Path, hint: str = "") -> Iterator[None]:
    """Makes errors of DuckDB and of the file system ones that say what failed, where, and what to do.

    Raises:
        StoreError: The block met one.
    """
    try:
        yield
    except (duckdb.Error, OSError) as error:
        raise access.error_of(failure, error, store_root, hint=hint) from error


def migrate_store(store_root: Path) -> list[str]:
    """Brings the live database to today's tables and views; returns the names of what ran, none when up to date.

    Raises:
        StoreError: See `hold` and `connect`, or this user may not write in the store.
    """
    ran: list[str] = []
    with explained(_CANNOT_OPEN, store_root), hold(store_root), connect(live_file(store_root), ran.append):
        return ran


def check(path: Path) -> None:
    """Looks whether a database file opens; the caller holds the ingest lock.

    Raises:
        StoreError: It does not.
        duckdb.IOException: This user may not read it.
    """
    with _damage_explained(path), duckdb.connect(str(path), read_only=True) as con:
        con.execute("select count(*) from ingest_manifest").fetchone()


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


def touch(con: duckdb.DuckDBPyConnection) -> None:
    """Gives the content a new identity; call it in every transaction that changes what readers see."""
    set_meta(con, "revision", uuid.uuid4().hex)


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
    if folder.is_relative_to(store_root) or folder.exists() or not sharing.is_shared(store_root):
        return
    found = store_root.stat()
    durable.make_folder(folder)
    os.chown(folder, -1, found.st_gid)
    folder.chmod(found.st_mode & 0o7777)


@contextlib.contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        if access.is_denied(error):
            raise  # a rebuild would meet the same; whoever knows the store says whose the file is
        raise StoreError(
            f"cannot open the live database: {str(error).splitlines()[0]}",
            where=str(path),
            hint="the spool is the truth: run `dflop store rebuild`",
        ) from error


def _check_version(con: duckdb.DuckDBPyConnection, folder: Path) -> None:
    written_by = get_meta(con, "duckdb_version")
    if _minor(written_by) > _minor(duckdb.__version__):
        raise StoreError(
            f"the live database was written by duckdb {written_by}, this is {duckdb.__version__}",
            where=str(folder),
            hint="ingest with the newer duckdb, or run `dflop store rebuild` with this one",
        )
    if written_by != duckdb.__version__:
        set_meta(con, "duckdb_version", duckdb.__version__)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()
