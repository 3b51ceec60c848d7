"""What faults do: to files of the store, the dataset and the run, to processes, disks and clocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from dflop.store import settings
from dflop.train import manifest
from tests.chaos.fault import Deed, NothingToStrike
from tests.chaos.play import Play
from tests.chaos.stage import CUT, MISSING, rows_of
from tests.launch.helpers import parent_of

Find = Callable[[Play], Path]
Edit = Callable[[Path, Play], None]
DISK_MB = 512
"""Room for three checkpoints of 95 MB, two that are kept and one that is written, and for the rest of a run."""


def at(find: Find, edit: Edit) -> Deed:
    """Something happens to a file."""
    return lambda play: edit(find(play), play)


# Where.


def _there(path: Path) -> Path:
    if not path.exists():
        raise NothingToStrike(f"no {path.name}")
    return path


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted((p for p in folder.glob(pattern) if not p.name.startswith(".")), key=lambda p: p.stat().st_mtime)
    return _there(found[-1] if found else folder / pattern)


def in_store(name: str) -> Find:
    return lambda play: _there(play.stage.store / name)


def in_run(name: str) -> Find:
    return lambda play: _there(play.run.path / name if play.run else play.stage.runs / name)


def snapshot(play: Play) -> Path:
    return _newest(play.stage.store / "snapshots", "dflop-*.duckdb")


def spool_file(play: Play) -> Path:
    return _newest(play.stage.store / "spool", "**/*.parquet")


def checkpoint(play: Play) -> Path:
    """The largest file of the newest one."""
    folder = _there(play.stage.runs) if play.run is None else play.run.checkpoints
    names = manifest.candidates(folder)
    if not names:
        raise NothingToStrike("no checkpoint")
    files = [p for p in (folder / names[0]).rglob("*") if p.is_file() and p.name != manifest.MANIFEST]
    return max(files, key=lambda p: p.stat().st_size)


# What happens to a file.


def removed(path: Path, _play: Play) -> None:
    path.unlink()


def cut(path: Path, _play: Play) -> None:
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path, _play: Play) -> None:
    os.truncate(path, 0)


def noise(num_bytes: int) -> Edit:
    return lambda path, play: path.write_bytes(play.rng.randbytes(num_bytes)) and None


def scribbled(path: Path, play: Play) -> None:
    """The beginning is noise."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(play.rng.randbytes(max(64, min(4096, path.stat().st_size))))


def flipped(path: Path, _play: Play) -> None:
    """One bit in the middle is another one."""
    with path.open("r+b") as file:
        middle = file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))


def torn(path: Path, _play: Play) -> None:
    """What is left of a line when the machine goes down."""
    with path.open("a") as file:
        file.write('{"run_id": "chaos-')


def a_folder(path: Path, _play: Play) -> None:
    path.unlink()
    path.mkdir()


def a_loop(path: Path, _play: Play) -> None:
    path.unlink()
    path.symlink_to(path.name)


def outside(path: Path, play: Play) -> None:
    target = play.stage.folder / path.name
    shutil.move(path, target)
    path.symlink_to(target)


def a_pipe(path: Path, _play: Play) -> None:
    path.unlink()
    os.mkfifo(path)


def another_picture(path: Path, play: Play) -> None:
    from PIL import Image

    Image.new("RGB", (640, 40), (play.rng.randrange(256), 0, 0)).save(path)


# The dataset.


def picture(edit: Edit, *, is_sure: bool) -> Deed:
    """Something happens to the picture of one sample; `is_sure`: that sample has to be left out because of it."""

    def strike(play: Play) -> None:
        spoilt = {MISSING, CUT} | play.must_be_left_out | play.may_be_left_out
        rows = [row for row in rows_of(play.stage.annotations) if "image" in row and row["id"] not in spoilt]
        if not rows:
            raise NothingToStrike("no sound picture is left")
        row = play.rng.choice(rows)
        edit(play.stage.media / row["image"], play)
        (play.must_be_left_out if is_sure else play.may_be_left_out).add(row["id"])
        play.notes.append(f"{row['image']} of sample {row['id']}")

    return strike


def touch(folder: Callable[[Play], Path], pattern: str) -> Deed:
    """Files have another time, as after a copy."""

    def strike(play: Play) -> None:
        for path in sorted(folder(play).glob(pattern)):
            os.utime(path)

    return strike


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


def moved(name: str, to: str) -> Deed:
    """A file or folder of the dataset is elsewhere, or back."""
    return lambda play: os.replace(play.stage.data / name, play.stage.data / to)


def broken_headers(play: Play) -> None:
    """The cache of headers is noise."""
    _newest(play.stage.store / "cache" / "headers", "*/*.parquet")
    for path in sorted((play.stage.store / "cache" / "headers").glob("*/*.parquet")):
        noise(100)(path, play)


# The store.


def foreign(content: Callable[[Play], bytes]) -> Deed:
    """A file in the spool that no dflop has written; it belongs into quarantine."""

    def strike(play: Play) -> None:
        folder = play.stage.store / "spool" / "correction" / "elsewhere"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"p-{len(play.notes):06d}.parquet").write_bytes(content(play))

    return strike


def half_a_spool_file(play: Play) -> bytes:
    whole = spool_file(play).read_bytes()
    return whole[: len(whole) // 2]


def same_key(play: Play) -> None:
    """A file that was ingested is there again with other bytes under a number that was not used."""
    path, other = spool_file(play), _newest(play.stage.store / "spool" / "run_record", "**/*.parquet")
    if path == other:
        raise NothingToStrike("one spool file only")
    path.with_name(path.name.replace("-000", "-900", 1)).write_bytes(other.read_bytes())


def leftover(play: Play) -> None:
    """What a writer on another node left when it was killed."""
    folder = play.stage.store / "spool" / "run_record" / "gone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".tmp-elsewhere-1-000000000000").write_bytes(b"PAR1")


def beside(*words: str, needs: Find | None = None) -> Deed:
    """Somebody else does something with the store meanwhile, by `python WORDS STORE`."""

    def strike(play: Play) -> None:
        if needs is not None:
            needs(play)
        play.beside(*words, str(play.stage.store))

    return strike


def another_ingester(play: Play) -> None:
    """`dflop store ingest --watch`, killed after some seconds."""
    process = play.beside("-m", "dflop.cli", "store", "ingest", "--watch", "--store", str(play.stage.store))
    play.later(2 + 4 * play.rng.random(), process.kill)


def rebuild(play: Play) -> None:
    """What the documents say where the live database does not open."""
    done = play.dflop("store", "rebuild", "--store", str(play.stage.store))
    if done.returncode:
        play.notes.append(f"rebuild failed: {done.stderr.strip()}")


def _disk(play: Play, name: str) -> Path:
    return play.stage.store if name == "store" else play.stage.runs


def mount_disk(name: str) -> Deed:
    """A small disk for the store, or for the runs, alone."""

    def strike(play: Play) -> None:
        folder = _disk(play, name)
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0 and name == "store":
            settings.init(folder, keep_snapshots=1, grace_s=0)

    return strike


def unmount_disks(play: Play) -> None:
    for folder in (play.stage.store, play.stage.runs):
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(name: str) -> Deed:
    """Not a byte is left, for some seconds."""

    def strike(play: Play) -> None:
        folder = _disk(play, name)
        if not os.path.ismount(folder):
            raise NothingToStrike("a disk of its own needs the right to mount one")
        with (folder / "filler").open("wb", buffering=0) as file:
            for num_bytes in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(num_bytes))
                except OSError:
                    continue
        play.later(8.0, lambda: free_disk(play))

    return strike


def free_disk(play: Play) -> None:
    for folder in (play.stage.store, play.stage.runs):
        (folder / "filler").unlink(missing_ok=True)


# Processes.


def to_driver(number: int) -> Deed:
    return lambda play: play.send(number)


def _rank(play: Play, job: str) -> int:
    ranks = play.ranks(job)
    if not ranks:
        raise NothingToStrike(f"no rank of {job}")
    return play.rng.choice(ranks)


def to_rank(number: int, job: str = "train") -> Deed:
    """A signal to one rank of a job."""
    return lambda play: os.kill(_rank(play, job), number)


def _named(play: Play, words: str) -> int:
    """The newest process of this run that has these words in its command line; no fork of one."""
    named = play.processes(words)
    found = sorted(pid for pid in named if parent_of(pid) not in named)
    if not found:
        raise NothingToStrike(f"no process `{words}`")
    return found[-1]


def to_process(words: str, number: int) -> Deed:
    return lambda play: os.kill(_named(play, words), number)


def _asleep(play: Play, pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    if seconds:
        play.later(seconds, lambda: pid in play.processes() and os.kill(pid, signal.SIGCONT))


def sleeping_rank(seconds: float) -> Deed:
    """A rank stands still for a while; 0: for ever."""
    return lambda play: _asleep(play, _rank(play, "train"), seconds)


def sleeping_process(words: str, seconds: float) -> Deed:
    return lambda play: _asleep(play, _named(play, words), seconds)


def sleeping_driver(play: Play) -> None:
    """The driver, which is the ingester, is stopped for three seconds."""
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
    if play.run is not None and play.run.checkpoints.exists():
        play.run.checkpoints.rename(play.stage.folder / "damaged-checkpoints")
