"""Which way up a video is shown: phones store frames as the sensor lies and state a matrix that turns them.

FFmpeg hands the matrix out with a decoded frame only, and decoding one frame costs more than all of a header. So the
boxes of MP4 and MOV, and the first bytes of Matroska, are looked through for a sign of a turn, in some 30 us; only a
file that has one is asked for a frame. Other containers state no matrix.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

import av
import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import SideData, Type

_SQUARE = 0.02
"""How much of a row of the matrix may lie off its axis: a degree."""
_MATRIX_OFFSET = {b"mvhd": (36, 48), b"tkhd": (40, 52)}
"""Offset of the matrix within a box, by the box's version."""
_MAX_BOXES = 10_000
_POSE_ROLL = (b"\x76\x75\x84", b"\x76\x75\x88")
"""Matroska's ProjectionPoseRoll, as a float of 4 or 8 bytes."""
_MATROSKA_HEAD_BYTES = 16_384


class OddAngle(ValueError):
    """A display matrix that is no quarter turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What brings a frame upright: sides change places, then rows are reversed, then columns are."""

    is_quarter: bool = False
    flips_rows: bool = False
    flips_columns: bool = False

    def upright(self, pixels_HWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Pixels of a frame as it is shown; a mirrored one is mirrored."""
        pixels = pixels_HWC.transpose(1, 0, 2) if self.is_quarter else pixels_HWC
        rows, columns = (-1 if flips else 1 for flips in (self.flips_rows, self.flips_columns))
        return np.ascontiguousarray(pixels[::rows, ::columns])


def turn_of(frame: av.VideoFrame) -> Turn:
    """The turn that a decoded frame's display matrix asks for; the same for all frames of a file.

    Raises:
        OddAngle: it is something else than quarters of a turn.
    """
    # A frame whose side data are looked at is freed by the garbage collector only: ask one frame of a video, not all.
    for data in cast("Iterable[SideData]", frame.side_data):  # PyAV says it iterates over names
        if data.type == Type.DISPLAYMATRIX:
            a, b, _, c, d, *_ = struct.unpack("<9i", bytes(data))
            break
    else:
        return Turn()
    straight, crossed = max(abs(a), abs(d)), max(abs(b), abs(c))
    if not straight and not crossed:
        return Turn()  # players take a matrix of zeros for none
    if min(straight, crossed) > _SQUARE * max(straight, crossed):
        raise OddAngle(
            f"display matrix turns the picture by {abs(frame.rotation)} degrees, which is not a quarter turn"
        )
    return Turn(False, d < 0, a < 0) if straight > crossed else Turn(True, b < 0, c < 0)


def states_a_turn(file: BinaryIO, format_name: str) -> bool:
    """Whether a container of FFmpeg's `format_name` shows a sign of a display matrix; a false alarm costs a frame."""
    if format_name.startswith("mov"):
        return any(a <= 0 or d <= 0 or b or c for a, b, c, d in _matrices(file))
    if format_name.startswith("matroska"):
        file.seek(0)
        head = file.read(_MATROSKA_HEAD_BYTES)
        return any(mark in head for mark in _POSE_ROLL)
    return False


def _matrices(file: BinaryIO) -> Iterator[tuple[int, int, int, int]]:
    """The first two rows of every matrix of a movie's header; one of zeros where there are too many boxes to look."""
    at, parents, num_boxes = 0, [file.seek(0, 2)], 0
    while parents:
        if at + 8 > parents[-1]:
            at = parents.pop()
            continue
        file.seek(at)
        head = file.read(16)
        size, name, head_bytes = int.from_bytes(head[:4], "big"), head[4:8], 8
        if size == 1:
            size, head_bytes = int.from_bytes(head[8:16], "big"), 16
        num_boxes += 1
        if num_boxes > _MAX_BOXES:
            yield 0, 0, 0, 0
            return
        end = parents[-1] if size < head_bytes else min(at + size, parents[-1])
        if name in (b"moov", b"trak"):
            parents.append(end)
            at += head_bytes
            continue
        if name in _MATRIX_OFFSET:
            file.seek(at + head_bytes)
            box = file.read(96)
            matrix = box[_MATRIX_OFFSET[name][box[:1] == b"\1"] :][:20]
            if len(matrix) == 20:
                a, b, _, c, d = struct.unpack(">5i", matrix)
                yield a, b, c, d
        at = end
