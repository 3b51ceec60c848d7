"""Decode workers: what they give, what they hold, and what becomes of them and of the files they die of."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from dflop.errors import TrainError
from dflop.records import MediaItem
from dflop.train.prefetch import MediaError, Prefetcher, Wanted

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A reader that does what the item's path says; picklable."""

    folder: Path

    def __call__(self, sample_index: int, item: MediaItem, level: int) -> np.ndarray:
        act, _, argument = item.path.partition(":")
        with (self.folder / "log").open("a") as log:
            log.write(f"{os.getpid()} {sample_index}\n")
        if act == "bad":
            raise MediaError(argument)
        if act == "bug":
            raise KeyError(argument)
        if act == "kill" or (act == "kill once" and not (self.folder / "killed").exists()):
            (self.folder / "killed").touch()
            os.kill(os.getpid(), getattr(signal, argument))
        if act == "hang":
            ctypes.PyDLL(None).sleep(3600)  # in C, with the interpreter's lock held: nothing but the kernel ends this
        return np.full((3, sample_index + 1), level, dtype=np.float32)


def wanted(index: int, act: str = "fine", *, level: int = 0, size_bytes: int = 12) -> Wanted:
    item = MediaItem("image", act, 8, 8, 1, 0.0, "vision", (1, 1, 1), 1, 1, 1)
    return Wanted(index, item, level, size_bytes)


@pytest.fixture
def prefetcher(tmp_path):
    made = []

    def make(num_workers=1, *, timeout_s=60.0, max_ahead_bytes=GIB, reader=None):
        made.append(
            Prefetcher(reader or Scripted(tmp_path), num_workers, timeout_s=timeout_s, max_ahead_bytes=max_ahead_bytes)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def calls(folder):
    """(process, sample) of every call of a `Scripted` reader, in order."""
    return [tuple(map(int, line.split())) for line in (folder / "log").read_text().splitlines()]


def test_arrays_come_whole_and_in_any_order(prefetcher, tmp_path):
    media = prefetcher(2)
    media.begin(0, {("vision", i): wanted(i, level=i + 10) for i in range(6)})
    for i in (5, 0, 3, 1, 2, 4):
        array = media.take(0, ("vision", i))
        assert np.array_equal(array, np.full((3, i + 1), i + 10, dtype=np.float32))
        array += 1  # its receiver's own
    assert sorted(index for _, index in calls(tmp_path)) == list(range(6))
    assert os.getpid() not in {process for process, _ in calls(tmp_path)}


def test_a_bad_file_is_a_media_error_with_the_readers_words_and_an_error_of_ours_is_not_blamed_on_it(prefetcher):
    media = prefetcher()
    acts = ("bad:truncated after 12 bytes", "bug:no such layout", "fine")
    media.begin(0, {("vision", i): wanted(i, act) for i, act in enumerate(acts)})
    with pytest.raises(MediaError, match=r"^truncated after 12 bytes$"):
        media.take(0, ("vision", 0))
    with pytest.raises(TrainError, match="reading `bug:no such layout` failed: KeyError: 'no such layout'") as caught:
        media.take(0, ("vision", 1))
    assert caught.value.where == "annotation row 1"
    assert "Traceback" in caught.value.hint
    assert media.take(0, ("vision", 2)).shape == (3, 3)


def test_a_file_that_kills_its_decoder_twice_is_bad_and_the_next_one_is_decoded(prefetcher, tmp_path):
    media = prefetcher()
    media.begin(0, {("vision", 0): wanted(0, "kill:SIGSEGV"), ("vision", 1): wanted(1)})
    with pytest.raises(MediaError, match=r"^its decoder died twice: SIGSEGV$"):
        media.take(0, ("vision", 0))
    assert media.take(0, ("vision", 1)).shape == (3, 2)
    assert [index for _, index in calls(tmp_path)] == [0, 0, 1]
    assert len({process for process, _ in calls(tmp_path)}) == 3


def test_a_decoder_killed_once_costs_no_sample(prefetcher, tmp_path, capsys):
    media = prefetcher()
    media.begin(0, {("vision", 0): wanted(2, "kill once:SIGKILL")})
    assert media.take(0, ("vision", 0)).shape == (3, 3)
    assert "decoder of kill once:SIGKILL died: SIGKILL (out of memory?); retrying" in capsys.readouterr().err


def test_a_file_that_hangs_its_decoder_is_bad(prefetcher, tmp_path):
    media = prefetcher(timeout_s=1)
    media.begin(0, {("vision", 0): wanted(0, "hang"), ("vision", 1): wanted(1)})
    with pytest.raises(MediaError, match=r"^not decoded within 1"):
        media.take(0, ("vision", 0))
    assert media.take(0, ("vision", 1)).shape == (3, 2)
    assert [index for _, index in calls(tmp_path)] == [0, 1], "what hangs is not tried twice"


def test_steps_ahead_wait_for_room(prefetcher, tmp_path):
    media = prefetcher(max_ahead_bytes=100)
    items = {("vision", i): wanted(i, size_bytes=30) for i in range(2)}
    assert media.begin(0, {("vision", 0): wanted(9, size_bytes=10 * GIB)}), "the next step is decoded whatever it takes"
    assert media.begin(1, items, if_room=True)
    assert not media.begin(2, items, if_room=True), "120 bytes"
    assert media.begin(1, items, if_room=True), "begun already"
    assert media.begin(1, items), "now it is the next step, which does not count"
    assert media.begin(2, items, if_room=True)
    media.finish(0)
    for step in (1, 2):
        for i in range(2):
            media.take(step, ("vision", i))
    assert sorted(index for _, index in calls(tmp_path) if index != 9) == [0, 0, 1, 1]


def test_closing_ends_a_decoder_that_hangs_and_whoever_waits_for_it(prefetcher):
    media = prefetcher(timeout_s=600)
    media.begin(0, {("vision", 0): wanted(0), ("vision", 1): wanted(1, "hang"), ("vision", 2): wanted(2)})
    media.take(0, ("vision", 0))
    errors = []

    def wait():
        try:
            media.take(0, ("vision", 1))
        except TrainError as error:
            errors.append(error.what)

    waiting = threading.Thread(target=wait)
    waiting.start()
    media.close()
    waiting.join(60)
    assert errors == ["decoding stopped: the job is ending"]
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


PROGRAM = """
    import os, sys
    from pathlib import Path
    from tests.train.test_prefetch import Prefetcher, Scripted, wanted
    media = Prefetcher(Scripted(Path(sys.argv[1])), 2, timeout_s=1, max_ahead_bytes=0)
    media.begin(0, {("vision", i): wanted(i, "hang" if i == 2 else "fine") for i in range(3)})
    for i in range(2):
        media.take(0, ("vision", i))
    {end}
"""


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "os.kill(os.getpid(), 9)"])
def test_no_worker_outlives_a_job_that_ended_without_closing(tmp_path, end):
    program = textwrap.dedent(PROGRAM).replace("{end}", end)
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120)
    assert ended.returncode in (3, -9)
    for process in {process for process, _ in calls(tmp_path)}:
        wait_for_end_of(process)


def wait_for_end_of(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    with os.fdopen(handle) as ending:
        poll = select.poll()
        poll.register(ending, select.POLLIN)
        assert poll.poll(60_000), "still there a minute later"


def test_workers_import_no_torch():
    program = "import sys, dflop.train.prefetch, dflop.jobs.sample_source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
