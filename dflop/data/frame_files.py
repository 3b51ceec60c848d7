"""Frames of a video that lie as pictures, as files: a folder's in order of its numbers, their size, their pixels."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample, confine, printable
from dflop.data.decode import decode_image
from dflop.data.frame_folders import MEDIA, PICTURES, FrameList
from dflop.data.headers import BadMedia, MediaSource, read_header
from dflop.data.media_value import Attached
from dflop.models.media import MediaHeader

_UNEVEN = 2
"""Numbers of a folder that step so many times as far at one place as at another have one missing between them."""


@dataclass(frozen=True, slots=True)
class FrameFiles:
    """Frames of a video, each a picture, in order."""

    files: tuple[MediaSource, ...]
    fps: float


AnySource = MediaSource | FrameFiles


def open_frames(frames: FrameList, media_root: Path, open_bytes: Callable[[Attached], MediaSource]) -> FrameFiles:
    """Files of frames.

    Args:
        frames: As the row names them.
        media_root: Folder of the media.
        open_bytes: Makes a file of bytes that stand in the row.

    Raises:
        BadSample: a path that leaves the media root, or a folder whose pictures do not say their order.
    """
    if len(frames.frames) == 1 and isinstance(path := frames.frames[0], str):
        real = confine(media_root, path)
        files = (real,) if real.is_file() else _in_folder(media_root, real, printable(path))
        return FrameFiles(files, frames.fps)
    opened = (confine(media_root, f) if isinstance(f, str) else open_bytes(f) for f in frames.frames)
    return FrameFiles(tuple(opened), frames.fps)


def header_of_source(kind: str, source: AnySource) -> MediaHeader:
    """As `read_header`, also of frames.

    Raises:
        BadMedia: as `read_header`, or frames of different sizes.
    """
    if not isinstance(source, FrameFiles):
        if kind == "video" and isinstance(source, Path) and source.is_dir():
            raise BadMedia("a folder of frames without a rate: set `sample_fps` (frames per second) in the row")
        return read_header(kind, source)
    first: MediaHeader | None = None
    for number, file in enumerate(source.files):
        try:
            header = read_header("image", file)
        except BadMedia as error:
            raise BadMedia(f"frame {number}: {error.reason}") from error
        first = first or header
        if header != first:
            sizes = ", ".join(f"{h.width_px} x {h.height_px} px" for h in (first, header))
            raise BadMedia(f"frames differ in size: {sizes} (frame {number})")
    if first is None:
        raise BadMedia("no frames")
    return MediaHeader("video", first.width_px, first.height_px, len(source.files), len(source.files) / source.fps)


def decode_files(source: FrameFiles, indices: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Chosen frames one by one, as `decode_frames` gives them.

    Raises:
        BadMedia: a frame that is missing, no picture or damaged.
    """
    for index in sorted(set(indices)):
        if index >= len(source.files):
            raise BadMedia(f"video ends after {len(source.files)} frames, frame {index} was requested")
        try:
            pixels = decode_image(source.files[index])
        except BadMedia as error:
            raise BadMedia(f"frame {index}: {error.reason}") from error
        yield index, pixels


def _in_folder(media_root: Path, folder: Path, where: str) -> tuple[Path, ...]:
    """Pictures of a folder in order of their numbers.

    Raises:
        BadSample: no folder, or their names do not say one order.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise BadSample(f"folder of frames cannot be read: {error.strerror}", path=where) from error
    pictures = [name for name in names if name.lower().endswith(PICTURES)]
    if other := [name for name in names if name.lower().endswith(MEDIA) and name not in pictures]:
        raise BadSample(f"folder of frames also holds {printable(other[0])}", path=where)
    if not pictures:
        raise BadSample("folder of frames holds no pictures", path=where)
    if len(patterns := sorted({re.sub(r"\d+", "#", name) for name in pictures})) > 1:
        shown = printable(", ".join(patterns[:3]))
        raise BadSample(f"file names in a folder of frames differ in more than numbers: {shown}", path=where)
    numbers = {tuple(map(int, re.findall(r"\d+", name))): name for name in pictures}
    if len(numbers) < len(pictures) or (len(pictures) > 1 and () in numbers):
        raise BadSample("two files in a folder of frames have the same number", path=where)
    order = sorted(numbers)
    _check_steps(order, where)
    return tuple(confine(media_root, os.path.join(folder, numbers[number])) for number in order)


def _check_steps(order: list[tuple[int, ...]], where: str) -> None:
    varying = [place for place in range(len(order[0])) if len({number[place] for number in order}) > 1]
    if len(varying) != 1 or len(order) <= 2:  # two frames make one step
        return
    numbers = [number[varying[0]] for number in order]
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    if max(steps) >= _UNEVEN * min(steps):
        at = steps.index(max(steps))
        raise BadSample(f"frames are missing between numbers {numbers[at]} and {numbers[at + 1]}", path=where)
