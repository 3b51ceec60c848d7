"""The live database: the only door to `<store>/live/dflop.duckdb`, for whoever holds the ingest lock.

Nobody may `open()` or copy that file inside this process: closing any descriptor of it drops DuckDB's lock (POSIX).
And a COMMIT after a failed statement reports success but commits nothing, hence `transaction`: every error rolls
back and travels on.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb

from dflop.errors import StoreError
from dflop.store import durable, lock, migrate

LOCK_TIMEOUT_S = 60.0


@contextlib.contextmanager
def open_live(store_root: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[duckdb.DuckDBPyConnection]:
    """Locks the store, opens the live database read-write and brings its tables and views up to date.

    Raises:
        StoreError: Locked by another process, damaged, written by a newer duckdb or a newer dflop.
    """
    folder = store_root / "live"
    durable.make_folder(folder)
    with lock.exclusive(store_root / "ingest.lock", timeout_s=lock_timeout_s):
        con = _connect(folder / "dflop.duckdb")
        try:
            with transaction(con):
                if migrate.apply(con):
                    touch(con)
            _check_version(con, folder)
            yield con
        finally:
            con.close()


@contextlib.contextmanager
def transaction(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Commits the block as a whole, or rolls it back and raises."""
    con.begin()
    try:
        yield
        con.commit()
    except BaseException:
        with contextlib.suppress(duckdb.TransactionException):  # a failed commit has already rolled back
            con.rollback()
        raise


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


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    try:
        return duckdb.connect(str(path))
    except duckdb.Error as error:
        raise StoreError(
            f"cannot open the live database: {str(error).splitlines()[0]}",
            where=str(path),
            hint="the spool is the truth: move this file away and ingest again to rebuild it",
        ) from error


def _check_version(con: duckdb.DuckDBPyConnection, folder: Path) -> None:
    written_by = get_meta(con, "duckdb_version")
    if _minor(written_by) > _minor(duckdb.__version__):
        raise StoreError(
            f"the live database was written by duckdb {written_by}, this is {duckdb.__version__}",
            where=str(folder),
            hint="ingest with the newer duckdb, or move live/ away and ingest again to rebuild it from the spool",
        )
    if written_by != duckdb.__version__:
        set_meta(con, "duckdb_version", duckdb.__version__)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()
