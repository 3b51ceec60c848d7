"""What faults do: to files of the store, the dataset and the run, to processes and disks."""

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
from tests.chaos.fault import Deed, NothingToStrike
from tests.chaos.play import Play
from tests.chaos.stage import CUT, MISSING, rows_of
from tests.launch.helpers import parent_of

Find = Callable[[Play], Path]


def _newest(folder: Path, pattern: str) -> Path:
    found = [path for path in folder.glob(pattern) if not path.name.startswith(".")]
    if not found:
        raise NothingToStrike(f"no {pattern}")
    return max(found, key=lambda path: path.stat().st_mtime)


def in_store(pattern: str) -> Find:
    return lambda play: _newest(play.stage.store, pattern)


def in_run(pattern: str) -> Find:
    return lambda play: _newest(play.stage.runs, f"chaos-*/{pattern}")


def checkpoint(play: Play) -> Path:
    """The largest file of the newest one."""
    folder = _newest(play.stage.runs, "chaos-*/checkpoints")
    for name in manifest.candidates(folder):
        files = [p for p in (folder / name).rglob("*") if p.is_file() and p.name != manifest.MANIFEST]
        return max(files, key=lambda p: p.stat().st_size)
    raise NothingToStrike("no checkpoint")


def at(find: Find, what: str, num_bytes: int = 20_000) -> Deed:
    return lambda play: edit(find(play), what, play, num_bytes)


def edit(path: Path, what: str, play: Play, num_bytes: int = 20_000) -> None:
    """Something happens to a file, in the words of the faults' names; `num_bytes` of noise."""
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


def picture(what: str, *, is_sure: bool) -> Deed:
    """Something happens to the picture of one sample; `is_sure`: that sample has to be left out because of it."""

    def strike(play: Play) -> None:
        spoilt = {MISSING, CUT} | play.must_be_left_out | play.may_be_left_out
        rows = [row for row in rows_of(play.stage.annotations) if "image" in row and row["id"] not in spoilt]
        if not rows:
            raise NothingToStrike("no sound picture is left")
        row = play.rng.choice(rows)
        edit(play.stage.media / row["image"], what, play)
        (play.must_be_left_out if is_sure else play.may_be_left_out).add(row["id"])
        play.notes.append(f"{row['image']} of sample {row['id']} {what}")

    return strike


def touch(pattern: str) -> Deed:
    """Files have another time, as after a copy."""

    def strike(play: Play) -> None:
        for path in sorted(play.stage.folder.glob(pattern)):
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
    in_store("cache/headers/*/*.parquet")(play)
    for path in sorted((play.stage.store / "cache" / "headers").glob("*/*.parquet")):
        edit(path, "of noise", play, 100)


def foreign(content: Callable[[Play], bytes]) -> Deed:
    """A file in the spool that no dflop has written; it belongs into quarantine."""

    def strike(play: Play) -> None:
        folder = play.stage.store / "spool" / "correction" / "elsewhere"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"p-{len(play.notes):06d}.parquet").write_bytes(content(play))

    return strike


def a_spool_file(play: Play) -> bytes:
    return in_store("spool/**/*.parquet")(play).read_bytes()


def half_a_spool_file(play: Play) -> bytes:
    whole = a_spool_file(play)
    return whole[: len(whole) // 2]


def same_key(play: Play) -> None:
    """Other bytes are there under a new number of a file that was ingested."""
    path, other = in_store("spool/**/*.parquet")(play), in_store("spool/run_record/**/*.parquet")(play)
    if path == other:
        raise NothingToStrike("one spool file only")
    path.with_name(path.name.replace("-000", "-900", 1)).write_bytes(other.read_bytes())


def leftover(play: Play) -> None:
    """What a writer on another node left when it was killed."""
    folder = play.stage.store / "spool" / "run_record" / "gone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".tmp-elsewhere-1-000000000000").write_bytes(b"PAR1")


def beside(*words: str, needs: str = ".", ends_s: Callable[[Play], float] | None = None) -> Deed:
    """Somebody else does something with the store meanwhile, by `python WORDS STORE`; killed after some seconds."""

    def strike(play: Play) -> None:
        if not any(play.stage.store.glob(needs)):
            raise NothingToStrike(f"no {needs}")
        process = play.beside(*words, str(play.stage.store))
        if ends_s is not None:
            play.later(ends_s(play), process.kill)

    return strike


def rebuild(play: Play) -> None:
    """What the documents say where the live database does not open."""
    done = play.dflop("store", "rebuild", "--store", str(play.stage.store))
    if done.returncode:
        play.notes.append(f"rebuild failed: {done.stderr.strip()}")


def mount_disk(name: str) -> Deed:
    """A small disk for `store` or `runs` alone: room for three checkpoints of 95 MB and for the rest of a run."""

    def strike(play: Play) -> None:
        folder = play.stage.folder / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(folder)]
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

    return strike


def free_disk(play: Play) -> None:
    for folder in (play.stage.store, play.stage.runs):
        (folder / "filler").unlink(missing_ok=True)


def to_driver(number: int) -> Deed:
    return lambda play: play.send(number)


def rank_of(job: str) -> Callable[[Play], int]:
    """A rank of a job."""

    def find(play: Play) -> int:
        ranks = play.ranks(job)
        if not ranks:
            raise NothingToStrike(f"no rank of {job}")
        return play.rng.choice(ranks)

    return find


def named(words: str) -> Callable[[Play], int]:
    """The newest process of this run that has these words in its command line; no fork of one."""

    def find(play: Play) -> int:
        found = play.processes(words)
        pids = [pid for pid in found if parent_of(pid) not in found]
        if not pids:
            raise NothingToStrike(f"no process `{words}`")
        return max(pids)

    return find


def signalled(find: Callable[[Play], int], number: int) -> Deed:
    return lambda play: os.kill(find(play), number)


def asleep(find: Callable[[Play], int], seconds: float) -> Deed:
    """A process stands still for a while; 0: for ever."""

    def strike(play: Play) -> None:
        pid = find(play)
        os.kill(pid, signal.SIGSTOP)
        if seconds:
            play.later(seconds, lambda: pid in play.processes() and os.kill(pid, signal.SIGCONT))

    return strike


def sleeping_driver(play: Play) -> None:
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
    in_run("checkpoints")(play).rename(play.stage.folder / "damaged-checkpoints")
