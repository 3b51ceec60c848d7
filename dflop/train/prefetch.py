"""Media decoded ahead of time, in processes that are not the rank's.

Why processes: pillow and FFmpeg let go of the interpreter's lock, so threads would decode as fast (measured: a training
loop next to a decoding thread is held up by at most 10 ms), but a decoder can hang, crash, or eat all memory on the
wrong file, and a process takes only itself with it. A thread per process waits for it, which makes every answer a
`Future`. The time limit is the kernel's: an alarm without a handler ends a process even where C code holds the
interpreter's lock. The process ends with its socket, so it cannot outlive its rank by more than the file it is
decoding, and that is limited. Nothing here imports torch, for a worker imports this file.

What is held: the media of the step that is prepared, whatever they take, and of `prefetch_steps - 1` steps behind it
as far as they fit into `max_ahead_bytes`. Sizes are known from the profile before anything is decoded.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.errors import TrainError, printable
from dflop.records import MediaItem
from dflop.units import seconds

Key = tuple[str, int]
"""(module, item) of a step's plan."""
Reader = Callable[[int, MediaItem, int], npt.NDArray[Any]]
"""(sample index, item, media level) -> encoder input; raises `MediaError`. Workers get a pickled copy."""
_START_TIMEOUT_S = 120.0
"""For imports and for finding the rows of the dataset, on a file system that is busy."""
_GRACE_S = 5.0
"""Beyond its own limit: a process that hangs in the file system does not end when it is told to."""
_OWNERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Meant for the rank, and sent to its whole process group or job step."""


class MediaError(Exception):
    """A media item cannot be decoded; the message is the quarantine reason."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A media item to decode."""

    sample_index: int
    media: MediaItem
    level: int
    """The sample's `media_level`."""
    size_bytes: int
    """Bytes of the decoded array."""


class Prefetcher:
    """Decodes the media of whole steps, in the order in which they are begun.

    Args:
        reader: Decodes one item; picklable.
        num_workers: Processes, started when there is something to decode.
        timeout_s: Seconds one item may take.
        max_ahead_bytes: Decoded media that may be held of steps begun with `if_room`.
    """

    def __init__(self, reader: Reader, num_workers: int, *, timeout_s: float, max_ahead_bytes: int) -> None:
        self._reader, self._timeout_s, self._max_ahead_bytes = reader, timeout_s, max_ahead_bytes
        self._begun: dict[int, dict[Key, Future[np.ndarray]]] = {}
        self._ahead_bytes: dict[int, int] = {}
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")
        self._own = threading.local()
        """Each thread's `worker`, once it was needed."""
        self._alive: set[_Worker] = set()
        self._closing = threading.Lock()
        self._is_closed = False

    def begin(self, step: int, wanted: Mapping[Key, Wanted], *, if_room: bool = False) -> bool:
        """Start decoding a step's media unless that was done; False where there is no room."""
        if step not in self._begun:
            size_bytes = sum(w.size_bytes for w in wanted.values())
            if if_room and sum(self._ahead_bytes.values()) + size_bytes > self._max_ahead_bytes:
                return False
            self._ahead_bytes[step] = size_bytes
            self._begun[step] = {key: self._threads.submit(self._decode, w) for key, w in wanted.items()}
        if not if_room:
            self._ahead_bytes.pop(step, None)  # it is the step that is prepared now
        return True

    def take(self, step: int, key: Key) -> np.ndarray:
        """An item of a step that was begun, once: waits for it and lets go of it.

        Raises:
            MediaError: it cannot be decoded, or its decoder took too long, or died of it twice.
            TrainError: workers do not start, or the reader raised something else.
        """
        return self._begun[step].pop(key).result()

    def finish(self, step: int) -> None:
        """Forget a step, and any before it."""
        for done in [s for s in self._begun if s <= step]:
            for future in self._begun.pop(done).values():
                future.cancel()
            self._ahead_bytes.pop(done, None)

    def close(self) -> None:
        """End all processes, also those in the middle of a file; whoever waits for an item gets an error."""
        with self._closing:
            self._is_closed = True
            workers = list(self._alive)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _decode(self, wanted: Wanted) -> np.ndarray:
        request = wanted.sample_index, wanted.media, wanted.level
        for is_last_try in (False, True):
            worker = getattr(self._own, "worker", None) or self._start()
            try:
                answer = worker.ask(request, self._timeout_s + _GRACE_S)
            except subprocess.CalledProcessError as death:
                self._own.worker = None
                self._alive.discard(worker)
                if self._is_closed:
                    raise TrainError("decoding stopped: the job is ending") from None
                if death.returncode == -signal.SIGALRM:
                    raise MediaError(f"not decoded within {seconds(self._timeout_s)}") from None
                if is_last_try:
                    # Once may be bad luck, of whoever is the largest when memory runs out.
                    raise MediaError(f"its decoder died twice: {_cause(death.returncode)}") from None
                path = printable(wanted.media.path)
                print(f"decoder of {path} died: {_cause(death.returncode)}; retrying", file=sys.stderr)
            else:
                return _array(answer, wanted)
        raise AssertionError("unreachable")

    def _start(self) -> _Worker:
        with self._closing:
            if self._is_closed:
                raise TrainError("decoding stopped: the job is ending")
            worker = _Worker()
            self._alive.add(worker)
        try:
            worker.ask((self._reader, self._timeout_s), _START_TIMEOUT_S)
        except subprocess.CalledProcessError as death:
            raise TrainError(
                f"a decode worker does not start: {_cause(death.returncode)}",
                hint="its own error is above, on stderr; train.num_workers=0 decodes without workers",
            ) from None
        self._own.worker = worker
        return worker


def _array(answer: Any, wanted: Wanted) -> np.ndarray:
    if isinstance(answer, np.ndarray):
        return answer
    kind, text = answer
    if kind == "bad":
        raise MediaError(text)
    raise TrainError(
        f"reading `{wanted.media.path}` failed: {text.strip().splitlines()[-1]}",
        where=f"annotation row {wanted.sample_index}",
        hint=f"program error, not a bad file:\n{text}",
    )


class _Worker:
    """One process and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._file = self._socket.makefile("rwb")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        with theirs:
            # Not `multiprocessing.Process`, which imports the program's main file, and so torch, once more.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from dflop.train.prefetch import serve; serve({theirs.fileno()})"],
                pass_fds=(theirs.fileno(),), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def ask(self, message: Any, within_s: float) -> Any:
        """Answer of the worker.

        Raises:
            subprocess.CalledProcessError: it has ended, or was made to after so many seconds.
        """
        self._socket.settimeout(within_s)
        try:
            _send(self._file, message)
            return pickle.load(self._file)
        except TimeoutError:
            self.kill()
            exit_code = -signal.SIGALRM
        except (EOFError, OSError, pickle.UnpicklingError):
            exit_code = self._process.wait()
        self._socket.close()
        with contextlib.suppress(OSError):  # a request that was not sent
            self._file.close()
        raise subprocess.CalledProcessError(exit_code, self._process.args)

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    killed = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    return f"{signal.Signals(-exit_code).name}{killed}"


def serve(fd: int) -> None:
    """What a worker does: answer requests until the other end closes.

    Args:
        fd: Of an inherited socket. The first message is (`Reader`, seconds one item may take), each later one its
            arguments.
    """
    for number in _OWNERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=fd) as owner, contextlib.suppress(EOFError, ConnectionError):
        file = owner.makefile("rwb")
        reader, timeout_s = pickle.load(file)
        _send(file, "ready")
        while True:
            request = pickle.load(file)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            answer = _answer(reader, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(file, answer)


def _answer(reader: Reader, request: tuple[int, MediaItem, int]) -> npt.NDArray[Any] | tuple[str, str]:
    try:
        return np.ascontiguousarray(reader(*request))
    except MediaError as error:
        return "bad", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def _send(to: io.BufferedIOBase, message: Any) -> None:
    """Write what `pickle.load` reads at the other end, the content of arrays into the memory where they stay."""
    pickle.dump(message, to, protocol=5)
    to.flush()
