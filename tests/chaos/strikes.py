"""What faults do: to files of the store, the dataset and the run, to processes and disks.

Paths are patterns below the folder of a run; of several files the newest is struck.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image

from dflop.store import settings
from dflop.train import manifest
from tests.chaos.play import NothingToStrike, Play
from tests.chaos.stage import CUT, MISSING, rows_of
from tests.launch.helpers import parent_of

T = TypeVar("T")
SPOOL = "store/spool/**/*.parquet"


def some(found: Sequence[T], what: str) -> Sequence[T]:
    if not found:
        raise NothingToStrike(f"no {what}")
    return found


def newest(play: Play, pattern: str) -> Path:
    found = [path for path in play.folder.glob(pattern) if not path.name.startswith(".")]
    return max(some(found, pattern), key=lambda path: path.stat().st_mtime)


CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "emptied": lambda _old, _rng: b"",
    "cut in half": lambda old, _rng: old[: len(old) // 2],
    "of noise": lambda old, rng: rng.randbytes(min(20_000, len(old))),
    "overwritten": lambda old, rng: rng.randbytes(4096) + old[4096:],
    "a byte is another one": lambda old, _rng: old[:-9] + bytes([old[-9] ^ 0x10]) + old[-8:],
    "torn": lambda old, _rng: old + b'{"run_id": "chaos-',  # a line, where the machine went down
}
PLACES: dict[str, Callable[[Path, Path], object]] = {
    "lost": lambda path, _aside: path,
    "that is a folder": lambda path, _aside: path.mkdir(),
    "that is a link to itself": lambda path, _aside: path.symlink_to(path.name),
    "that leads outside": lambda path, aside: path.symlink_to(aside),
    "that is a pipe": lambda path, _aside: os.mkfifo(path),
    "replaced by another": lambda path, _aside: Image.new("RGB", (640, 40), "red").save(path),
}
"""What happens to a file, in the words of the faults' names: to its bytes, or to its place once it is moved aside."""


def edit(play: Play, pattern: str, what: str) -> None:
    path = newest(play, pattern)
    if what in CONTENTS:
        path.chmod(0o644)
        path.write_bytes(CONTENTS[what](path.read_bytes(), play.rng))
    else:
        PLACES[what](path, Path(shutil.move(path, play.folder / f"aside-{path.name}")))


def to_all(play: Play, pattern: str, deed: Callable[[Path], object]) -> None:
    newest(play, pattern)
    for path in sorted(play.folder.glob(pattern)):
        deed(path)


def edit_checkpoint(play: Play, what: str) -> None:
    """Something happens to the largest file of the newest one."""
    names = manifest.candidates(newest(play, "runs/*/checkpoints"))
    files = [path for name in names[:1] for path in play.runs.glob(f"*/checkpoints/{name}/**/*")]
    files = [path for path in files if path.is_file() and path.name != manifest.MANIFEST]
    largest = max(some(files, "checkpoint"), key=lambda path: path.stat().st_size)
    edit(play, str(largest.relative_to(play.folder)), what)


def edit_picture(play: Play, what: str, *, is_sure: bool = False) -> None:
    """Something happens to the picture of one sample; `is_sure`: that sample has to be left out because of it."""
    spoilt = {MISSING, CUT} | play.must_be_left_out | play.may_be_left_out
    rows = [row for row in rows_of(play.annotations) if "image" in row and row["id"] not in spoilt]
    row = play.rng.choice(some(rows, "sound picture"))
    edit(play, f"data/media/{row['image']}", what)
    (play.must_be_left_out if is_sure else play.may_be_left_out).add(row["id"])
    play.notes.append(f"{row['image']} of sample {row['id']} {what}")


def bad_rows(play: Play) -> None:
    """Rows that are no samples; the profile leaves them out."""
    mute = {"id": "mute", "conversations": [{"from": "human", "value": "hello?"}]}
    with play.annotations.open("a") as file:
        file.write('{"id": "torn", "conversations": [\n' + json.dumps(mute) + "\n")
    play.must_be_left_out |= {"mute"}
    play.may_be_left_out |= {"torn", ""}


def another_row(play: Play) -> None:
    """A row more than the run has begun with."""
    path = play.annotations
    shutil.copyfile(path, play.folder / "data" / "aside")
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([rows[-3].replace('"id": "', '"id": "more-'), *rows]))


def move(play: Play, name: str, to: str) -> None:
    """A file or folder of the dataset is elsewhere, or back."""
    os.replace(play.folder / "data" / name, play.folder / "data" / to)


def foreign(play: Play, content: Callable[[Play], bytes], name: str = "correction/elsewhere/p-{:06d}.parquet") -> None:
    """A file in the spool that no dflop has finished; what has the name of a spool file belongs into quarantine."""
    path = play.store / "spool" / name.format(len(play.notes))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(play))


def spool_bytes(play: Play) -> bytes:
    return newest(play, SPOOL).read_bytes()


def same_key(play: Play) -> None:
    """Other bytes are there under a new number of a file that was ingested."""
    other = newest(play, "store/spool/run_record/**/*.parquet")
    path = newest(play, "store/spool/[!r]*/**/*.parquet")
    path.with_name(path.name.replace("-000", "-900", 1)).write_bytes(other.read_bytes())


def somebody(play: Play, *words: str, needs: str = "store") -> subprocess.Popen[bytes]:
    """Somebody else does something with the store meanwhile, by `python WORDS`."""
    newest(play, needs)
    return play.also(*words)


def second_ingester(play: Play) -> None:
    process = somebody(play, "-m", "dflop.cli", "store", "ingest", "--watch", "--store", "store")
    play.later(2 + 4 * play.rng.random(), process.kill)


def mount_disk(play: Play, name: str) -> None:
    """A small disk for `store` or `runs` alone: room for three checkpoints of 95 MB and for the rest of a run."""
    folder = play.folder / name
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode == 0 and name == "store":
        settings.init(folder, keep_snapshots=1, grace_s=0)


def unmount_disks(play: Play) -> None:
    for folder in (play.store, play.runs):
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(play: Play, name: str) -> None:
    """Not a byte is left, for some seconds."""
    folder = play.folder / name
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
    for folder in (play.store, play.runs):
        (folder / "filler").unlink(missing_ok=True)


def rank(play: Play, job: str) -> int:
    return play.rng.choice(some(play.ranks(job), f"rank of {job}"))


def named(play: Play, words: str) -> int:
    """The newest process of this run that has these words in its command line; no fork of one."""
    found = play.processes(words)
    return max(some([pid for pid in found if parent_of(pid) not in found], f"process `{words}`"))


def send(play: Play, find: Callable[[Play, str], int], which: str, number: int, goes_on_after_s: float = 0.0) -> None:
    pid = find(play, which)
    os.kill(pid, number)
    if goes_on_after_s:
        play.later(goes_on_after_s, lambda: pid in play.processes() and os.kill(pid, signal.SIGCONT))


def stop_driver(play: Play) -> None:
    """The driver, which is the ingester, is stopped for three seconds, and nobody strikes meanwhile."""
    play.send(signal.SIGSTOP)
    time.sleep(3)
    play.send(signal.SIGCONT)


def second_driver(play: Play) -> None:
    done = play.dflop(*play.command)
    if done.returncode != 5 or "already has a driver: process" not in done.stderr:
        play.notes.append(f"WRONG: a second driver ended with {done.returncode}: {done.stderr.strip()[-300:]}")
