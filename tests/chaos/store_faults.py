"""Faults of the store: files that are lost, damaged or foreign, disks that fill, and ingesters that die or linger."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from dflop.store import settings
from tests.chaos.dying import DIED
from tests.chaos.fault import Deed, End, Fault, NothingToStrike
from tests.chaos.play import Play

DISK_MB, _FILLER = 512, "filler"
"""Room for three checkpoints of 95 MB, two that are kept and one that is written, and for the rest of a run."""
_TOO_FULL_S = 8.0
_KILLED = (End(-9),)
_LOCK_HELD_S = 5.0


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted((p for p in folder.glob(pattern) if not p.name.startswith(".")), key=lambda p: p.stat().st_mtime)
    if not found:
        raise NothingToStrike(f"no {pattern} in {folder}")
    return found[-1]


def _in_store(name: str) -> Callable[[Play], Path]:
    def find(play: Play) -> Path:
        path = play.stage.store / name
        if not path.exists():
            raise NothingToStrike(f"no {name}")
        return path

    return find


def _snapshot(play: Play) -> Path:
    return _newest(play.stage.store / "snapshots", "dflop-*.duckdb")


def remove(find: Callable[[Play], Path]) -> Deed:
    return lambda play: find(play).unlink()


def cut(find: Callable[[Play], Path]) -> Deed:
    """The second half of a file is gone."""

    def deed(play: Play) -> None:
        path = find(play)
        path.chmod(0o644)
        os.truncate(path, path.stat().st_size // 2)

    return deed


def scribble(find: Callable[[Play], Path]) -> Deed:
    """The beginning of a file is noise."""

    def deed(play: Play) -> None:
        path = find(play)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(play.rng.randbytes(max(64, min(4096, path.stat().st_size))))

    return deed


def foreign(content: Callable[[Play], bytes]) -> Deed:
    """A file in the spool that no dflop has written; it belongs into quarantine."""

    def deed(play: Play) -> None:
        folder = play.stage.store / "spool" / "correction" / "elsewhere"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"p-{len(play.notes):06d}.parquet").write_bytes(content(play))

    return deed


def _half_a_spool_file(play: Play) -> bytes:
    whole = _newest(play.stage.store / "spool", "**/*.parquet").read_bytes()
    return whole[: len(whole) // 2]


def _another_files_bytes(play: Play) -> bytes:
    return _newest(play.stage.store / "spool", "**/*.parquet").read_bytes()


def same_key(play: Play) -> None:
    """A file that was ingested is there again with other bytes under a number that was used; then it is put back."""
    path = _newest(play.stage.store / "spool", "**/*.parquet")
    other = _newest(play.stage.store / "spool" / "run_record", "**/*.parquet")
    if path == other:
        raise NothingToStrike("one spool file only")
    stray = path.with_name(path.name.replace("-000", "-900", 1))
    stray.write_bytes(other.read_bytes())


def touch(play: Play) -> None:
    """Files that are known have another time, as after a restore."""
    for path in sorted((play.stage.store / "spool").glob("**/*.parquet")):
        os.utime(path)


def leftover(play: Play) -> None:
    """What a writer on another node left when it was killed."""
    folder = play.stage.store / "spool" / "run_record" / "gone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".tmp-elsewhere-1-000000000000").write_bytes(b"PAR1")


def hold_lock(play: Play) -> None:
    """Somebody else ingests, and takes his time."""
    code = (
        "import sys, time; from dflop.store import live; from pathlib import Path\n"
        f"with live.hold(Path(sys.argv[1])): time.sleep({_LOCK_HELD_S})"
    )
    play.beside("-c", code, str(play.stage.store))


def another_ingester(play: Play) -> None:
    """`dflop store ingest --watch`, killed after some seconds."""
    process = play.beside("-m", "dflop.cli", "store", "ingest", "--watch", "--store", str(play.stage.store))
    play.later(2 + 4 * play.rng.random(), process.kill)


def reader(play: Play) -> None:
    """Somebody keeps a snapshot open for a while."""
    code = (
        "import sys, time; from dflop.store import snapshot; con, _ = snapshot.open_current(sys.argv[1])\n"
        "for _ in range(20): con.execute('select count(*) from run_record').fetchall(); time.sleep(0.5)"
    )
    _snapshot(play)
    play.beside("-c", code, str(play.stage.store))


def meanwhile(*words: str) -> Deed:
    """A command of somebody else at the same store."""

    def deed(play: Play) -> None:
        _in_store("CURRENT")(play)
        play.beside("-m", "dflop.cli", *words, "--store", str(play.stage.store))

    return deed


def _disk_of(play: Play, name: str) -> Path:
    return play.stage.store if name == "store" else play.stage.runs


def mount_disk(name: str) -> Deed:
    """A small disk of its own for the store, or for the runs."""

    def prepare(play: Play) -> None:
        folder = _disk_of(play, name)
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
        is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
        if is_mounted and name == "store":
            settings.init(folder, keep_snapshots=1, grace_s=0)

    return prepare


def unmount_disks(play: Play) -> None:
    """Take the disks away; where there is none, nothing."""
    for folder in (play.stage.store, play.stage.runs):
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(name: str) -> Deed:
    """Not a byte is left, for some seconds."""

    def strike(play: Play) -> None:
        folder = _disk_of(play, name)
        if not os.path.ismount(folder):
            raise NothingToStrike("a disk of its own needs the right to mount one")
        with (folder / _FILLER).open("wb", buffering=0) as file:
            for num_bytes in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(num_bytes))
                except OSError:
                    continue
        play.later(_TOO_FULL_S, lambda: free_disk(play))

    return strike


def free_disk(play: Play) -> None:
    for folder in (play.stage.store, play.stage.runs):
        (folder / _FILLER).unlink(missing_ok=True)


def rebuild(play: Play) -> None:
    """What the documents say where the live database does not open."""
    done = play.dflop("store", "rebuild", "--store", str(play.stage.store))
    if done.returncode:
        play.note(f"rebuild failed: {done.stderr.strip()}")


def sleeping_driver(play: Play) -> None:
    """The driver, which is the ingester, is stopped for some seconds."""
    pid = play.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


def _broken(title: str, deed: Deed, kind: str, *ends: End) -> Fault:
    """Something happens to a file while nobody trains."""
    return Fault(title, "store", "training", deed, ends, is_between=True, excludes=kind)


_LIVE, _CURRENT = _in_store("live/dflop.duckdb"), _in_store("CURRENT")
_FULL = (
    *(End(code, "No space left on device", free_disk) for code in (1, 4, 5)),
    *(End(code, "is full", free_disk) for code in (1, 4, 5)),
)
_STORE = "dflop.store"
_DYING = {
    "inside a transaction": "ingest:_insert:behind:3",
    "behind a commit": "ingest:_verify:before:3",
    "behind the copy of a snapshot": "snapshot:copy_database:behind:3",
    "before the publish log": "publishes:append:before:3",
    "before CURRENT": "durable:replace:before:3",
    "behind a spool file": "durable:write_new:behind:2",
}

FAULTS = (
    _broken("live database lost", remove(_LIVE), "live"),
    _broken("live database cut in half", cut(_LIVE), "live", End(4, "", rebuild)),
    _broken("live database overwritten", scribble(_LIVE), "live", End(4, "", rebuild)),
    Fault("CURRENT lost", "store", "training", remove(_CURRENT), excludes="current"),
    _broken("CURRENT overwritten", scribble(_CURRENT), "current", End(4, "CURRENT is damaged", remove(_CURRENT))),
    _broken("snapshot lost", remove(_snapshot), "snapshot"),
    _broken("snapshot cut in half", cut(_snapshot), "snapshot"),
    _broken("snapshot overwritten", scribble(_snapshot), "snapshot"),
    Fault("spool: a file cut in half", "store", "training", foreign(_half_a_spool_file)),
    Fault("spool: an empty file", "store", "starting", foreign(lambda _: b"")),
    Fault("spool: a file of noise", "store", "probing", foreign(lambda play: play.rng.randbytes(5000))),
    Fault("spool: a file under another's name", "store", "training", foreign(_another_files_bytes)),
    Fault("spool: other bytes under a new number", "store", "training", same_key),
    Fault("spool: all files touched", "store", "training", touch),
    Fault("spool: leftover of a dead writer", "store", "starting", leftover),
    Fault("somebody holds the lock", "store", "training", hold_lock),
    Fault("a second ingester, killed", "store", "training", another_ingester),
    Fault("a reader that stays", "store", "training", reader),
    Fault("rebuild in the midst", "store", "training", meanwhile("store", "rebuild")),
    Fault("verify in the midst", "store", "training", meanwhile("store", "verify")),
    Fault("compact in the midst", "store", "training", meanwhile("store", "compact")),
    *(
        Fault(
            f"disk of the {name} full for 8 s", "store", "training", fill_disk(name), _FULL, prepare=mount_disk(name),
            excludes="disk",
        )
        for name in ("store", "runs")
    ),
    Fault("ingester stopped for 3 s", "store", "training", sleeping_driver),
    Fault("ingester killed while it publishes", "store", "publishing", lambda play: play.send(signal.SIGKILL), _KILLED),
    *(
        Fault(
            f"ingester dies {where}", "store", "before", lambda _: None, DIED, excludes="dying",
            dies_at=f"{_STORE}.{place}",
        )
        for where, place in _DYING.items()
    ),
)  # fmt: skip
