"""The process that decodes media for a rank: requests in over a socket, arrays out. It imports no torch.

A decoder can hang, crash, or eat all memory on the wrong file, and takes only this process with it. The time limit is
the kernel's: an alarm without a handler ends a process even where C code holds the interpreter's lock. The process ends
with the socket, so it cannot outlive its rank by more than the file it is decoding, and that is limited.
"""

from __future__ import annotations

import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.records import MediaItem

Reader = Callable[[int, MediaItem, int], npt.NDArray[Any]]
"""(sample index, item, media level) -> encoder input; raises `MediaError`. Workers get a pickled copy."""

_LENGTH = struct.Struct("<Q")
_OWNERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Meant for the rank, and sent to its whole process group or job step."""


class MediaError(Exception):
    """A media item cannot be decoded; the message is the quarantine reason."""


def main(socket_fd: int) -> None:
    """Serve requests until the other end closes.

    Args:
        socket_fd: Inherited. The first message is (`Reader`, seconds one item may take), each later one its arguments.
    """
    for number in _OWNERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=socket_fd) as owner:
        try:
            reader, timeout_s = receive(owner)
            send(owner, "ready")
            while True:
                request = receive(owner)
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
                answer = _answer(reader, request)
                signal.setitimer(signal.ITIMER_REAL, 0)
                send(owner, answer)
        except (EOFError, ConnectionError):
            return


def _answer(reader: Reader, request: tuple[int, MediaItem, int]) -> npt.NDArray[Any] | tuple[str, str]:
    try:
        return np.ascontiguousarray(reader(*request))
    except MediaError as error:
        return "bad", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def send(to: socket.socket, message: Any) -> None:
    """Write one message; the content of arrays is not copied on the way to the socket."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    for part in (head, pickle.dumps([raw.nbytes for raw in raws])):
        to.sendall(_LENGTH.pack(len(part)))
        to.sendall(part)
    for raw in raws:
        to.sendall(raw)


def receive(source: socket.socket) -> Any:
    """Read one message; arrays are received in place.

    Raises:
        EOFError: the other end closed, or died.
    """
    head = _exactly(source, _LENGTH.unpack(_exactly(source, _LENGTH.size))[0])
    sizes = pickle.loads(_exactly(source, _LENGTH.unpack(_exactly(source, _LENGTH.size))[0]))
    return pickle.loads(head, buffers=[_exactly(source, size) for size in sizes])


def _exactly(source: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    view = memoryview(content)
    while len(view):
        count = source.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return content
