"""Read-only copies of the live database, one file per publish, that everyone else reads.

A snapshot always gets a new name: DuckDB caches databases by path, so a file renamed over a fixed name would go
unseen by a process that has the old one open. The copy is one of the file, after a checkpoint: seconds per gigabyte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from dflop import files
from dflop.errors import StoreError
from dflop.records import from_dict, parse_json
from dflop.store import access, durable, live, migrate, publishes, retention
from dflop.store.lease import Lease
from dflop.store.live import Progress
from dflop.store.publishes import Publish
from dflop.store.spool import SpoolKey

_COPY_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

# One configuration for every snapshot connection: DuckDB refuses a second, different one on the same file in a process.
# Nothing outside the file can be reached, nothing spills to disk, and none of it can be changed from SQL.
_OFF = ("enable_external_access", "autoinstall_known_extensions", "autoload_known_extensions")
READ_CONFIG: dict[str, Any] = {
    **dict.fromkeys((*_OFF, "allow_community_extensions", "python_enable_replacements"), "false"),
    "temp_directory": "", "memory_limit": "4GiB", "threads": "4", "lock_configuration": "true",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Current:
    """Content of CURRENT: which snapshot is the newest, its file below the store, the lease that published it."""

    seq: int
    file: str
    sha256: str
    revision: str
    """Content identity of the live database it was copied from."""
    duckdb: str
    published_at_s: float
    epoch: int = 0
    num_bytes: int = 0
    """Bytes of the file; 0 where an older dflop published it."""


class DamagedCurrentError(StoreError):
    """CURRENT does not say which snapshot is the newest; the next ingest writes it anew."""


def read_current(store_root: Path | str) -> Current | None:
    """The newest published snapshot; None before the first.

    Raises:
        DamagedCurrentError: CURRENT is no file, may not be read, is damaged, or names something else than a snapshot.
        StoreError: It cannot be read.
    """
    path = Path(store_root) / "CURRENT"
    try:
        if not path.is_file() and os.path.lexists(path):
            raise ValueError("not a file")
        current = from_dict(Current, parse_json(path.read_text(encoding="utf-8")))
        if not 0 < current.seq < 1_000_000_000 or current.file != f"snapshots/dflop-{current.seq:06d}.duckdb":
            raise ValueError(f"it names number {current.seq} and `{current.file}`, which do not match")
        return current
    except FileNotFoundError:
        return None
    except PermissionError as error:
        failure = access.error_of("CURRENT cannot be read", error, Path(store_root))
        raise DamagedCurrentError(failure.what, where=failure.where, hint=failure.hint) from error
    except OSError as error:
        raise StoreError(f"CURRENT cannot be read: {error.strerror}", where=str(path), hint="try again") from error
    except (ValueError, TypeError) as error:
        hint = "run `dflop store ingest` to publish a snapshot and a new CURRENT; nothing is lost"
        raise DamagedCurrentError(f"CURRENT is damaged: {error}", where=str(path), hint=hint) from error


def open_current(store_root: Path | str) -> tuple[duckdb.DuckDBPyConnection, Current]:
    """Opens the newest snapshot read-only; returns the connection and which snapshot it is.

    A client of a network file system may see an old CURRENT that names a collected file: then it is read again.

    Raises:
        StoreError: Nothing was published yet, or the file cannot be opened.
    """
    root = Path(store_root)
    for pause_s in (0.2, 0.4, 0.0):
        current = read_current(root)
        if current is None:
            hint = "check the store path, or run `dflop store ingest` after a first profile"
            raise StoreError("the store has no snapshot yet", where=str(root), hint=hint)
        try:
            return duckdb.connect(str(root / current.file), read_only=True, config=READ_CONFIG), current
        except duckdb.Error as error:
            if pause_s and not os.path.exists(root / current.file):
                time.sleep(pause_s)
                continue
            failure = f"cannot open snapshot {current.seq}"
            if access.is_denied(error):
                raise access.error_of(failure, error, root) from error
            message, hint = f"{failure}: {str(error).splitlines()[0]}", "run `dflop store ingest` to publish a new one"
            raise StoreError(message, where=str(root / current.file), hint=hint) from error
    raise AssertionError("unreachable")


def lag(con: duckdb.DuckDBPyConnection) -> str:
    """What to do where a snapshot lacks what is new in this dflop; empty where it has the tables and views of today."""
    hint = "another version of dflop published this snapshot: run `dflop store ingest`"
    with contextlib.suppress(duckdb.Error):
        return "" if migrate.is_of_today(con) else hint
    return ""


def run(con: duckdb.DuckDBPyConnection, statement: str | duckdb.Statement, params: Any = None) -> Any:
    """Runs a statement so that its Arrow result streams: has `to_arrow_reader` and `to_arrow_table`.

    With parameters, a relation of duckdb 1.5 takes 300 ms for what a cursor does in 4 (100,000 rows); a cursor of
    duckdb 2 collects all rows before it gives the first, and only says better where in the text a statement fails.
    """
    if int(duckdb.__version__.partition(".")[0]) >= 2:
        with contextlib.suppress(duckdb.Error):
            return con.sql(statement, params=params)
    return con.execute(statement, params)


def publish_if_stale(
    con: duckdb.DuckDBPyConnection, store_root: Path, lease: Lease, say: Progress, *, is_urgent: bool = True
) -> int:
    """Publishes the live database unless the newest snapshot already holds its content; returns the newest `seq`.

    What is not urgent waits until a snapshot is due (`retention.py`): the copy costs what the whole store holds.

    Raises:
        StoreError: The copy differs from the live database, or another ingester took over.
        OSError: The disk is full; CURRENT still names the previous snapshot.
    """
    problem, current, is_fresh = "", None, False
    try:
        if current := read_current(store_root):
            is_fresh = current.revision == live.get_meta(con, "revision")
            problem = _damage(store_root, current) if is_fresh or not is_urgent else ""
            size, at_s = current.num_bytes, current.published_at_s
            if not (is_fresh or is_urgent or problem or retention.is_due(con, store_root, size, at_s)):
                return current.seq
    except DamagedCurrentError as error:  # unreadable counts: it can be replaced where its folder may be written
        problem = error.what
    if not current or not is_fresh or problem:
        # The live database may be lost, old files are collected, CURRENT may be removed: together they remember.
        ((logged,),) = con.execute("select coalesce(max(seq), 0) from publish_log").fetchall()
        seqs = (publishes.last_seq(store_root), logged, *retention.snapshots(store_root))
        seq = 1 + max(current.seq if current else 0, *seqs)
        if not current and not problem and seq > 1:
            problem = "CURRENT was lost"
        _remove_expired(store_root)  # the copy may need their room
        current = _publish(con, store_root, seq, lease)
        lease.check()
        if problem:
            say(f"{problem}; snapshot {seq}, a new copy of the live database, replaces it; nothing is lost")
        _set_aside(store_root / "CURRENT", seq, say)
        durable.replace(store_root / "CURRENT", json.dumps(dataclasses.asdict(current), indent=1).encode())
        _remove_expired(store_root)
    link = store_root / "current.duckdb"
    if not link.is_symlink() or os.readlink(link) != current.file:  # also after a publish that died in between
        _set_aside(link, current.seq, say)
        with files.replacing(link) as tmp:
            os.symlink(current.file, tmp)
    return current.seq


def expired(store_root: Path) -> list[Path]:
    """Snapshots that nobody needs; where CURRENT is damaged, the newest ones stay."""
    current = None
    with contextlib.suppress(DamagedCurrentError):
        current = read_current(store_root)
    return retention.expired(store_root, current.seq if current else 0)


def _remove_expired(store_root: Path) -> None:
    for path in expired(store_root):
        path.unlink(missing_ok=True)


def _set_aside(path: Path, seq: int, say: Progress) -> None:
    """Renames a folder that is where a file has to be."""
    if path.is_dir() and not path.is_symlink():
        kept = path.rename(path.with_name(f"{path.name}.was-a-folder-{seq}"))
        say(f"{path} was a folder: kept as {kept.name}")


def _damage(store_root: Path, current: Current) -> str:
    """What is wrong with the newest snapshot by size and revision; to read all of it in every pass would not scale."""
    path, name = store_root / current.file, f"snapshot {current.seq} ({current.file})"
    try:
        size = path.stat().st_size
        if current.num_bytes and size != current.num_bytes:
            return f"{name} has {size} bytes, {current.num_bytes} were published"
        with duckdb.connect(str(path), read_only=True, config=READ_CONFIG) as con:
            is_it = live.get_meta(con, "revision") == current.revision
            return "" if is_it else f"{name} differs from what CURRENT lists"
    except (duckdb.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        return f"{name} does not open: {reason}"


def copy_database(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Copies a database into a new file in the storage version of snapshots, and counts every table of the copy.

    Raises:
        StoreError: A table of the copy has another number of rows.
        OSError: The file cannot be copied; the disk is full.
    """
    own = "where database_name = current_database()"
    about = f"select database_name, path, tags['storage_version'] from duckdb_databases() {own}"
    ((name, source, version),) = con.execute(about).fetchall()
    cp = shutil.which("cp", path=os.pathsep.join([os.environ.get("PATH", ""), os.defpath]))
    old, wanted = ([int(number) for number in re.findall(r"\d+", v)] for v in (version, live.STORAGE_VERSION))
    if cp and old <= wanted:
        con.execute("checkpoint")
        _copy_file(cp, Path(source), path)
    else:  # made by duckdb 2 before dflop asked for a version that older clients open
        with live.attached(con, path, "snapshot", f"storage_version '{live.STORAGE_VERSION}'"):
            con.execute(f'copy from database "{name}" to snapshot')
    tables = con.execute(f"select table_name from duckdb_tables() {own}").fetchall()
    with live.attached(con, path, "snapshot"):
        for (table,) in tables:
            counts = (f'(select count(*) from "{db}"."{table}")' for db in (name, "snapshot"))
            ((rows, copied),) = con.execute(f"select {', '.join(counts)}").fetchall()
            if rows != copied:
                raise StoreError(f"the copy of {table} has {copied} rows, the live table {rows}", where=str(path))


def _copy_file(cp: str, source: Path, target: Path) -> None:
    """Copies a database that nobody is writing, in another process: here, closing it would drop DuckDB's lock on it."""
    command = [cp, "--reflink=auto", "--", str(source), str(target)]
    done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, stderr=subprocess.PIPE)
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        code = next((c for c in _COPY_ERRNOS if os.strerror(c) in message), errno.EIO)
        raise OSError(code, message or f"cp ended with code {done.returncode}", str(target))


def _publish(con: duckdb.DuckDBPyConnection, store_root: Path, seq: int, lease: Lease) -> Current:
    final = store_root / "snapshots" / f"dflop-{seq:06d}.duckdb"
    durable.make_folder(final.parent)
    for leftover in final.parent.glob(f"{files.TMP_PREFIX}*"):
        leftover.unlink()  # of an ingester that died: we hold its lock now
    publish = _log(con, store_root, seq, lease)
    tmp = files.tmp_path(final)
    try:
        copy_database(con, tmp)
        files.fsync(tmp)
        with open(tmp, "rb") as file:
            sha256, num_bytes = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
        os.chmod(tmp, 0o444)
        lease.check()
        os.link(tmp, final)  # unlike rename, refuses a number that another ingester has used
    finally:
        tmp.unlink(missing_ok=True)  # after an error too: a full disk must not stay full of us
    files.fsync(final.parent)
    # Before CURRENT: every snapshot that a reader can have seen is in the log.
    publishes.append(store_root, publish)
    name, at_s = final.relative_to(store_root).as_posix(), publish.published_at_s
    return Current(seq, name, sha256, publish.revision, publish.duckdb, at_s, lease.epoch, num_bytes)


def _log(con: duckdb.DuckDBPyConnection, store_root: Path, seq: int, lease: Lease) -> Publish:
    """Numbers the files this snapshot is the first to hold, those of publishes that died on the way included."""
    publish = Publish(seq, live.get_meta(con, "revision"), duckdb.__version__, time.time())
    with live.transaction(con, lease):
        publishes.note(con, publish)
        is_new = "snapshot_seq is null or snapshot_seq > ?"
        con.execute(
            f"update ingest_manifest set snapshot_seq = ? where {is_new}", [seq, publishes.last_seq(store_root)]
        )
    sql = "select kind, run_id, producer, seq from ingest_manifest where snapshot_seq = ? order by all"
    return dataclasses.replace(publish, keys=tuple(SpoolKey(*key) for key in con.execute(sql, [seq]).fetchall()))
