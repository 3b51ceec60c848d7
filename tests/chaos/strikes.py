"""What faults do: to files of the store, the dataset and the run, to processes and disks.

Paths are patterns below the folder of a run; of several files the newest is struck.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from dflop.store import settings
from dflop.train import manifest
from tests.chaos.fault import NothingToStrike
from tests.chaos.play import Play
from tests.chaos.stage import CUT, MISSING, rows_of
from tests.launch.helpers import parent_of

SPOOL = "store/spool/**/*.parquet"


def newest(play: Play, pattern: str) -> Path:
    found = [path for path in play.stage.folder.glob(pattern) if not path.name.startswith(".")]
    if not found:
        raise NothingToStrike(f"no {pattern}")
    return max(found, key=lambda path: path.stat().st_mtime)


def edit(play: Play, pattern: str, what: str, num_bytes: int = 0) -> None:
    """Something happens to a file, in the words of the faults' names; `num_bytes` of noise."""
    path = newest(play, pattern)
    size = path.stat().st_size
    match what:
        case "lost":
            path.unlink()
        case "emptied":
            os.truncate(path, 0)
        case "cut in half":
            path.chmod(0o644)
            os.truncate(path, size // 2)
        case "of noise":
            path.write_bytes(play.rng.randbytes(num_bytes))
        case "overwritten":  # the beginning of it
            path.chmod(0o644)
            _write_at(path, 0, play.rng.randbytes(max(64, min(4096, size))))
        case "a byte is another one":
            _write_at(path, size // 2, bytes([path.read_bytes()[size // 2] ^ 0x10]))
        case "torn":  # what is left of a line when the machine goes down
            _write_at(path, size, b'{"run_id": "chaos-')
        case "that is a folder":
            path.unlink()
            path.mkdir()
        case "that is a link to itself":
            path.unlink()
            path.symlink_to(path.name)
        case "that leads outside":
            path.symlink_to(shutil.move(path, play.stage.folder / path.name))
        case "that is a pipe":
            path.unlink()
            os.mkfifo(path)
        case "replaced by another":
            Image.new("RGB", (640, 40), (play.rng.randrange(256), 0, 0)).save(path)


def _write_at(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def edit_checkpoint(play: Play, what: str) -> None:
    """Something happens to the largest file of the newest one."""
    names = manifest.candidates(newest(play, "runs/*/checkpoints"))
    files = [path for name in names[:1] for path in play.stage.runs.glob(f"*/checkpoints/{name}/**/*")]
    files = [path for path in files if path.is_file() and path.name != manifest.MANIFEST]
    if not files:
        raise NothingToStrike("no checkpoint")
    largest = max(files, key=lambda path: path.stat().st_size)
    edit(play, str(largest.relative_to(play.stage.folder)), what)


def edit_picture(play: Play, what: str, *, is_sure: bool = False) -> None:
    """Something happens to the picture of one sample; `is_sure`: that sample has to be left out because of it."""
    spoilt = {MISSING, CUT} | play.must_be_left_out | play.may_be_left_out
    rows = [row for row in rows_of(play.stage.annotations) if "image" in row and row["id"] not in spoilt]
    if not rows:
        raise NothingToStrike("no sound picture is left")
    row = play.rng.choice(rows)
    edit(play, f"data/media/{row['image']}", what, 20_000)
    (play.must_be_left_out if is_sure else play.may_be_left_out).add(row["id"])
    play.notes.append(f"{row['image']} of sample {row['id']} {what}")


def edit_headers(play: Play) -> None:
    """The cache of headers is noise."""
    newest(play, "store/cache/headers/*/*.parquet")
    for path in sorted(play.stage.store.glob("cache/headers/*/*.parquet")):
        path.write_bytes(play.rng.randbytes(100))


def touch(play: Play, pattern: str) -> None:
    """Files have another time, as after a copy."""
    for path in sorted(play.stage.folder.glob(pattern)):
        os.utime(path)


def bad_rows(play: Play) -> None:
    """Rows that are no samples; the profile leaves them out."""
    mute = {"id": "mute", "conversations": [{"from": "human", "value": "hello?"}]}
    with play.stage.annotations.open("a") as file:
        file.write('{"id": "torn", "conversations": [\n' + json.dumps(mute) + "\n")
    play.must_be_left_out |= {"mute"}
    play.may_be_left_out |= {"torn", ""}


def another_row(play: Play) -> None:
    """A row more than the run has begun with."""
    path = play.stage.annotations
    shutil.copyfile(path, play.stage.data / "aside")
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([rows[-3].replace('"id": "', '"id": "more-'), *rows]))


def move(play: Play, name: str, to: str) -> None:
    """A file or folder of the dataset is elsewhere, or back."""
    os.replace(play.stage.data / name, play.stage.data / to)


def foreign(play: Play, content: Callable[[Play], bytes]) -> None:
    """A file in the spool that no dflop has written; it belongs into quarantine."""
    path = play.stage.store / "spool" / "correction" / "elsewhere" / f"p-{len(play.notes):06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(play))


def spool_bytes(play: Play) -> bytes:
    return newest(play, SPOOL).read_bytes()


def same_key(play: Play) -> None:
    """Other bytes are there under a new number of a file that was ingested."""
    path, other = newest(play, SPOOL), newest(play, "store/spool/run_record/**/*.parquet")
    if path == other:
        raise NothingToStrike("one spool file only")
    path.with_name(path.name.replace("-000", "-900", 1)).write_bytes(other.read_bytes())


def leftover(play: Play) -> None:
    """What a writer on another node left when it was killed."""
    folder = play.stage.store / "spool" / "run_record" / "gone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".tmp-elsewhere-1-000000000000").write_bytes(b"PAR1")


def somebody(play: Play, *words: str, needs: str = "store") -> None:
    """Somebody else does something with the store meanwhile, by `python WORDS STORE`."""
    newest(play, needs)
    play.also(*words, str(play.stage.store))


def second_ingester(play: Play) -> None:
    """`dflop store ingest --watch`, killed after some seconds."""
    process = play.also("-m", "dflop.cli", "store", "ingest", "--watch", "--store", str(play.stage.store))
    play.later(2 + 4 * play.rng.random(), process.kill)


def rebuild(play: Play) -> None:
    """What the documents say where the live database does not open."""
    done = play.dflop("store", "rebuild", "--store", str(play.stage.store))
    if done.returncode:
        play.notes.append(f"rebuild failed: {done.stderr.strip()}")


def mount_disk(play: Play, name: str) -> None:
    """A small disk for `store` or `runs` alone: room for three checkpoints of 95 MB and for the rest of a run."""
    folder = play.stage.folder / name
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode == 0 and name == "store":
        settings.init(folder, keep_snapshots=1, grace_s=0)


def unmount_disks(play: Play) -> None:
    for folder in (play.stage.store, play.stage.runs):
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(play: Play, name: str) -> None:
    """Not a byte is left, for some seconds."""
    folder = play.stage.folder / name
    if not os.path.ismount(folder):
        raise NothingToStrike("a disk needs the right to mount one")
    with (folder / "filler").open("wb", buffering=0) as file:
        for num_bytes in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(num_bytes))
            except OSError:
                continue
    play.later(8.0, lambda: free_disk(play))


def free_disk(play: Play) -> None:
    for folder in (play.stage.store, play.stage.runs):
        (folder / "filler").unlink(missing_ok=True)


def rank(play: Play, job: str) -> int:
    """A rank of a job."""
    ranks = play.ranks(job)
    if not ranks:
        raise NothingToStrike(f"no rank of {job}")
    return play.rng.choice(ranks)


def named(play: Play, words: str) -> int:
    """The newest process of this run that has these words in its command line; no fork of one."""
    found = play.processes(words)
    pids = [pid for pid in found if parent_of(pid) not in found]
    if not pids:
        raise NothingToStrike(f"no process `{words}`")
    return max(pids)


def send(play: Play, find: Callable[[Play, str], int], which: str, number: int) -> None:
    os.kill(find(play, which), number)


def stop(play: Play, find: Callable[[Play, str], int], which: str, seconds: float) -> None:
    """A process stands still for a while; 0: for ever."""
    pid = find(play, which)
    os.kill(pid, signal.SIGSTOP)
    if seconds:
        play.later(seconds, lambda: pid in play.processes() and os.kill(pid, signal.SIGCONT))


def stop_driver(play: Play) -> None:
    """The driver, which is the ingester, is stopped for three seconds, and nobody strikes meanwhile."""
    os.kill(play.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(play.pid, signal.SIGCONT)


def second_driver(play: Play) -> None:
    """Somebody else issues the same command."""
    done = play.dflop(*play.command)
    if done.returncode != 5 or "is being driven by process" not in done.stderr:
        play.notes.append(f"WRONG: a second driver ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def checkpoints_away(play: Play) -> None:
    """To start over, as the message says."""
    newest(play, "runs/*/checkpoints").rename(play.stage.folder / "damaged-checkpoints")
