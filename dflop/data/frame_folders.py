"""Videos that lie as pictures: a list of frames in a row, or a folder of numbered ones, at a rate that the row states.

They are a video file of these frames at that rate: as long as their number says, sampled by the rules of the family,
upright, all of one size. The rate stands in `sample_fps`, `fps` or `video_fps` of the row or part, as qwen-vl-utils has
it. Nothing is assumed where none stands: 1 and 30 frames a second are as common, and positions and sampling follow
from it. `keys.py` refuses a rate given with a recording, where it would mean resampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflop.data.annotations import BadSample
from dflop.data.media_value import EXTENSIONS, Attached, read_value, shortened

RATE_KEYS = ("sample_fps", "fps", "video_fps")
_VALUES = ("video", "video_url", "input_video", "path", "url")
"""Keys of a part that may hold frames."""
PICTURES = tuple(f".{extension}" for extension in EXTENSIONS["image"] if extension != "gif")
MEDIA = tuple(f".{extension}" for extensions in EXTENSIONS.values() for extension in extensions)
_MAX_RATE = 1000.0


class NoRate(BadSample):
    """A row with frames of a video that does not say how many of them are a second."""


@dataclass(frozen=True, slots=True)
class FrameList:
    """Frames as a row names them."""

    frames: tuple[str | Attached, ...]
    """In order; a single path may be that of a folder."""
    fps: float

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that are no bytes."""
        return tuple(frame for frame in self.frames if isinstance(frame, str))

    @property
    def names(self) -> tuple[str, ...]:
        """What those that are bytes are called."""
        return tuple(frame.name for frame in self.frames if not isinstance(frame, str))


def entries_of(value: object, kind: str) -> list[Any]:
    """The items that a value of a row's `image`, `videos` and such names: a list of pictures alone is one video."""
    if not isinstance(value, list):
        return [] if value is None else [value]
    are_pictures = (
        kind == "video" and bool(value) and all(isinstance(v, str) and v.lower().endswith(PICTURES) for v in value)
    )
    return [value] if are_pictures else value


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


def _take(entry: Mapping[str, Any], values: list[Any], what: str) -> tuple[dict[str, Any], tuple[float, ...]]:
    given = [key for key in RATE_KEYS if entry.get(key) not in (None, "", [])]
    if not given or not values or not all(map(_is_frames, values)):
        return dict(entry), ()
    rates = {key: _rates(entry[key], key, len(values), what) for key in given}
    if len(set(rates.values())) > 1:
        raise BadSample(f"{what} has `{given[0]}` and `{given[1]}`, which differ", key=given[1])
    return {key: value for key, value in entry.items() if key not in RATE_KEYS}, rates[given[0]]


def _is_frames(value: object) -> bool:
    """Whether a value that names a video may name frames: a list, or a path that may be a folder's."""
    if isinstance(value, list):
        return bool(value)
    return isinstance(value, str) and not value.lower().endswith(MEDIA) and not value.startswith("data:")


def _rates(value: object, key: str, count: int, what: str) -> tuple[float, ...]:
    listed = value if isinstance(value, list) else [value] * count
    if len(listed) != count:
        raise BadSample(f"{what} has {len(listed)} rates in `{key}` for {count} videos of frames", key=key)
    rates = tuple(map(_rate, listed))
    if bad := [given for given, rate in zip(listed, rates, strict=True) if not 0 < rate <= _MAX_RATE]:
        raise BadSample(
            f"{what} has `{key}` {shortened(bad[0])}: must be frames per second, up to {_MAX_RATE:g}", key=key
        )
    return rates


def _rate(value: object) -> float:
    """A number, also one in a string; nan of anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan
