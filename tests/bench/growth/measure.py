"""One part at one size, in a process of its own: processor seconds, seconds on the clock, peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tests.bench.growth.part import Part, Point, Work

REPEATS, REPEAT_FOR_S = 5, 0.5
"""A work is repeated until one of both is used up,"""
LEAST_REPEATS, LEAST_FOR_S = 3, 10.0
"""but so often at least, if that takes no longer: a best of five would be quick beside the only one of a large size."""
WARM_LIMIT_S = 600.0
"""For the smallest size, which may be the first to compile a kernel."""
_SERVER = multiprocessing.get_context("forkserver")


class MeasureError(Exception):
    """A part could not be measured at a size; says why."""


def in_a_process(part: Part, size: int, limit_s: float) -> Point:
    """Measures in a new process, which starts with what a server has imported and nothing else.

    Raises:
        MeasureError: it failed, died or took longer than `limit_s`, what prepares it included.
    """
    # A folder of ours, not of the child's: it may be killed.
    with tempfile.TemporaryDirectory(prefix="dflop-growth-") as folder:
        return _found_in(Path(folder), part, size, limit_s)


def _found_in(folder: Path, part: Part, size: int, limit_s: float) -> Point:
    _SERVER.set_forkserver_preload(["tests.bench.growth.parts"])
    ours, theirs = _SERVER.Pipe(duplex=False)
    process = _SERVER.Process(target=_child, args=(theirs, part.name, size, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        found: Point | str | None = None
        for allowed_s in (WARM_LIMIT_S, limit_s):  # None: the smallest size is done
            if found is None:
                if not ours.poll(allowed_s):
                    raise MeasureError(f"not done after {allowed_s:g} s")
                found = ours.recv()
    except EOFError:
        process.join()
        raise MeasureError(f"its process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not isinstance(found, Point):
        raise MeasureError(str(found))
    return found


def measured(part: Part, size: int, folder: Path, is_warm: Callable[[], None] = lambda: None) -> Point:
    """Measures in this process, after the smallest size has been run once, so that nothing is compiled or opened.

    Args:
        part: What is measured.
        size: How much of it.
        folder: Empty.
        is_warm: Called when the smallest size is done.
    """
    part.prepare(part.sizes[0], _empty(folder / "warm"))()
    is_warm()
    work = part.prepare(size, _empty(folder / "0"))
    _let_go()
    before_bytes = _resident("VmRSS")
    _forget_peak()
    cpu_s, wall_s = _timed(work)
    peak_bytes = max(0, _resident("VmHWM") - before_bytes)
    spent_s, repeats = wall_s, 1
    while _is_wanted(repeats, spent_s):
        if part.is_once:
            shutil.rmtree(folder / f"{repeats - 1}", ignore_errors=True)
            work = part.prepare(size, _empty(folder / f"{repeats}"))
        again_cpu_s, again_s = _timed(work)
        cpu_s, wall_s = min(cpu_s, again_cpu_s), min(wall_s, again_s)
        spent_s, repeats = spent_s + again_s, repeats + 1
    return Point(size, cpu_s, wall_s, peak_bytes)


def _is_wanted(repeats: int, spent_s: float) -> bool:
    """Whether there should be another repeat."""
    is_rare = repeats < LEAST_REPEATS and spent_s < LEAST_FOR_S
    return is_rare or (repeats < REPEATS and spent_s < REPEAT_FOR_S)


def _child(answer: Connection, name: str, size: int, folder: Path) -> None:
    from tests.bench.growth.parts import PARTS

    part = next(p for p in PARTS if p.name == name)
    try:
        answer.send(measured(part, size, folder, lambda: answer.send(None)))
    except Exception:  # the parent tells it and goes on with the next part
        answer.send(traceback.format_exc(limit=-3))


def _timed(work: Work) -> tuple[float, float]:
    """(processor seconds of all threads, seconds on the clock)."""
    gc.collect()
    wall_s, cpu_s = -time.perf_counter(), -time.process_time()
    work()
    return cpu_s + time.process_time(), wall_s + time.perf_counter()


def _empty(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _let_go() -> None:
    """Gives memory that the smallest size left behind back to the system, or the work would find it there."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def _forget_peak() -> None:
    """Lets the system begin anew with the most memory that this process has held."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
