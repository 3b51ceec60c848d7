"""Videos that lie as pictures: a list of frames in a row, or a folder of numbered ones, at a rate that the row states.

They are a video file of these frames at that rate: as long as their number says, sampled by the rules of the family,
upright, all of one size. The rate stands in `sample_fps`, `fps` or `video_fps` of the row or part, as qwen-vl-utils has
it. Nothing is assumed where none stands: 1 and 30 frames a second are as common, and positions and sampling follow
from it. `row_keys.py` refuses a rate given with a recording, where it would mean resampling.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample, confine, printable
from dflop.data.decode import decode_image
from dflop.data.headers import BadMedia, MediaSource, read_header
from dflop.data.media_value import EXTENSIONS, Attached, read_value, shortened
from dflop.models.media import MediaHeader

RATE_KEYS = ("sample_fps", "fps", "video_fps")
_VALUES = ("video", "video_url", "input_video", "path", "url")
"""Keys of a part that may hold frames."""
PICTURES = tuple(f".{extension}" for extension in EXTENSIONS["image"] if extension != "gif")
MEDIA = tuple(f".{extension}" for extensions in EXTENSIONS.values() for extension in extensions)
_MAX_RATE = 1000.0
_UNEVEN = 2
"""Numbers of a folder that step so many times as far at one place as at another have one missing between them."""


class NoRate(BadSample):
    """A row with frames of a video that does not say how many of them are a second."""


@dataclass(frozen=True, slots=True)
class FrameList:
    """Frames as a row names them, in order; a single path may be that of a folder."""

    frames: tuple[str | Attached, ...]
    fps: float

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of frames that are not bytes in the row."""
        return tuple(frame for frame in self.frames if isinstance(frame, str))

    @property
    def names(self) -> tuple[str, ...]:
        """What those that are bytes are called."""
        return tuple(frame.name for frame in self.frames if not isinstance(frame, str))


@dataclass(frozen=True, slots=True)
class FrameFiles:
    """Frames of a video, each a picture, in order."""

    files: tuple[MediaSource, ...]
    fps: float


AnySource = MediaSource | FrameFiles


def entries_of(value: object, kind: str) -> list[Any]:
    """The items that a value of a row's `image`, `videos` and such names: a list of pictures alone is one video."""
    if not isinstance(value, list):
        return [] if value is None else [value]
    are_pictures = value and all(isinstance(v, str) and v.lower().endswith(PICTURES) for v in value)
    return [value] if kind == "video" and are_pictures else value


def take_rates(row: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[float, ...]]:
    """A row without the rates of its frames, and the rate of each of its videos; none where a recording is among them.

    Raises:
        BadSample: a rate is no number, rates differ, or there are not as many as videos.
    """
    values = next((entries_of(row[key], "video") for key in ("video", "videos") if row.get(key) is not None), [])
    return _take(row, values, "row")


def take_rate(part: Mapping[str, Any], what: str) -> tuple[dict[str, Any], float | None]:
    """A part without the rate of its frames, and that rate; none where it is no video or a recording.

    Raises:
        BadSample: as `take_rates`.
    """
    kind = str(part.get("type") or next((key for key in _VALUES[:3] if key in part), ""))
    values = [part[key] for key in _VALUES if part.get(key) is not None] if "video" in kind else []
    left, rates = _take(part, values[:1], what)
    return left, rates[0] if rates else None


def _take(entry: Mapping[str, Any], values: list[Any], what: str) -> tuple[dict[str, Any], tuple[float, ...]]:
    given = [key for key in RATE_KEYS if entry.get(key) not in (None, "", [])]
    if not given or not values or not all(map(_may_be_frames, values)):
        return dict(entry), ()
    first, *others = ((key, _rates(entry[key], key, len(values), what)) for key in given)
    for key, rates in others:
        if rates != first[1]:
            raise BadSample(f"{what} has `{first[0]}` and `{key}`, which differ", key=key)
    return {key: value for key, value in entry.items() if key not in RATE_KEYS}, first[1]


def _may_be_frames(value: object) -> bool:
    """Whether a value that names a video is a list, or a path that may be a folder's."""
    if isinstance(value, str):
        return not value.lower().endswith(MEDIA) and not value.startswith("data:")
    return isinstance(value, list) and bool(value)


def _rates(value: object, key: str, count: int, what: str) -> tuple[float, ...]:
    listed = value if isinstance(value, list) else [value] * count
    if len(listed) != count:
        raise BadSample(f"{what} has {len(listed)} rates in `{key}` for {count} videos of frames", key=key)
    rates = []
    for given in listed:
        try:
            rate = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else math.nan
        except (ValueError, OverflowError):
            rate = math.nan
        if not 0 < rate <= _MAX_RATE:
            must = f"must be frames per second, up to {_MAX_RATE:g}"
            raise BadSample(f"{what} has `{key}` {shortened(given)}: {must}", key=key)
        rates.append(rate)
    return tuple(rates)


def frame_list(value: object, fps: float | None, what: str) -> FrameList | None:
    """The frames that a value names; None of one that is no list, and no folder with a rate.

    Raises:
        NoRate: frames without a rate.
        BadSample: a frame that names no file.
    """
    if isinstance(value, list) and value:
        if fps is None:
            raise NoRate(
                f"{what} holds {len(value)} frames of a video but no rate: set `sample_fps` (frames per second)"
            )
        found = [read_value(entry, f"frame {number} of {what}") for number, entry in enumerate(value)]
        if None in found:
            raise BadSample(f"frame {found.index(None)} of {what} names no file")
        return FrameList(tuple(frame for frame in found if frame is not None), fps)
    if fps is not None and isinstance(value, str) and isinstance(path := read_value(value, what), str):
        return FrameList((path,), fps)
    return None


def open_frames(frames: FrameList, media_root: Path, open_bytes: Callable[[Attached], MediaSource]) -> FrameFiles:
    """Files of frames; `open_bytes` makes one of bytes that stand in the row.

    Raises:
        BadSample: a path that leaves the media root, or a folder whose pictures do not say their order.
    """
    files = tuple(confine(media_root, f) if isinstance(f, str) else open_bytes(f) for f in frames.frames)
    if len(files) == 1 and isinstance(file := files[0], Path) and not file.is_file():
        files = _in_folder(media_root, file, printable(frames.paths[0]))
    return FrameFiles(files, frames.fps)


def _in_folder(media_root: Path, folder: Path, where: str) -> tuple[Path, ...]:
    """Pictures of a folder in order of their numbers."""
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
    if len(numbers) < len(pictures):
        raise BadSample("two files in a folder of frames have the same number", path=where)
    varying = [sorted(of_place) for of_place in map(set, zip(*numbers, strict=True)) if len(of_place) > 1]
    if len(varying) == 1 and len(numbers) > 2:  # two frames make one step
        steps = [(after - before, before, after) for before, after in itertools.pairwise(varying[0])]
        longest, before, after = max(steps, key=lambda step: step[0])
        if longest >= _UNEVEN * min(steps)[0]:
            raise BadSample(f"frames are missing between numbers {before} and {after}", path=where)
    return tuple(confine(media_root, os.path.join(folder, numbers[number])) for number in sorted(numbers))


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
        with _naming(number):
            header = read_header("image", file)
        first = first or header
        if header != first:
            sizes = ", ".join(f"{h.width_px} x {h.height_px} px" for h in (first, header))
            raise BadMedia(f"frames differ in size: {sizes} (frame {number})")
    assert first is not None, "a list of frames is not empty"
    return MediaHeader("video", first.width_px, first.height_px, len(source.files), len(source.files) / source.fps)


def decode_files(source: FrameFiles, indices: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Chosen frames one by one, as `decode_frames` gives them.

    Raises:
        BadMedia: a frame that is missing, no picture or damaged.
    """
    for index in sorted(set(indices)):
        if index >= len(source.files):
            raise BadMedia(f"video ends after {len(source.files)} frames, frame {index} was requested")
        with _naming(index):
            pixels = decode_image(source.files[index])
        yield index, pixels


@contextmanager
def _naming(number: int) -> Iterator[None]:
    try:
        yield
    except BadMedia as error:
        raise BadMedia(f"frame {number}: {error.reason}") from error
