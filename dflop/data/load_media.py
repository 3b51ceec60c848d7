"""One media item of a sample, decoded and brought to the exact array its encoder takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from dflop.data.decode import decode_audio, decode_frames, decode_image
from dflop.data.frame_files import AnySource, FrameFiles, decode_files
from dflop.data.headers import BadMedia
from dflop.models.arrays import SAMPLE_RATE_HZ
from dflop.models.family import Family
from dflop.records import MediaItem

_AUDIO_SLACK_S, _AUDIO_SLACK_FRAC = 0.5, 0.05


def load_item(source: AnySource, item: MediaItem, family: Family, level: int = 0) -> npt.NDArray[np.generic]:
    """Encoder input of `item`, with as many positions as its profiled grid promised.

    Args:
        source: Its file, an open one that lies inside another, or its frames.
        item: The profiled item.
        family: Turns decoded media into arrays.
        level: The sample's `media_level`.

    Raises:
        BadMedia: the file is missing, damaged, or not what was profiled.
    """
    versions: list[npt.NDArray[np.generic]]
    if isinstance(source, FrameFiles):
        indices = family.frame_indices(item.num_frames, item.duration_s, level)
        versions = _resized(item, family, level, decode_files(source, indices), indices)
    elif item.kind == "audio":
        # Twice of what was profiled is held at most, however much there is: enough to say how long it is.
        longest_s = 2 * item.duration_s + 1
        samples = decode_audio(source, SAMPLE_RATE_HZ, max_duration_s=longest_s)
        _check_duration(len(samples) / SAMPLE_RATE_HZ, item.duration_s)
        versions = [samples]
    elif item.kind == "image":
        versions = _resized(item, family, level, iter([(0, decode_image(source))]), (0,))
    else:
        indices = family.frame_indices(item.num_frames, item.duration_s, level)
        versions = _resized(item, family, level, decode_frames(source, indices), indices)
    array: npt.NDArray[np.generic] = family.array_of(item, versions)
    return array


def _resized(
    item: MediaItem,
    family: Family,
    level: int,
    frames: Iterator[tuple[int, npt.NDArray[np.uint8]]],
    indices: Sequence[int],
) -> list[npt.NDArray[np.generic]]:
    """Frames at `indices` in every size that the family takes; each is made small as it arrives, then forgotten.

    Raises:
        BadMedia: they are not of the profiled size.
    """
    sizes_px = family.frame_sizes_px(item, level)
    versions = [np.empty((len(indices), *size_px, 3), np.uint8) for size_px in sizes_px]
    positions: dict[int, list[int]] = {}
    for position, index in enumerate(indices):
        positions.setdefault(index, []).append(position)
    for index, frame in frames:
        height_px, width_px = frame.shape[:2]
        if (height_px, width_px) != (item.height_px, item.width_px):
            raise BadMedia(
                f"{item.kind} is {width_px}x{height_px} px but was profiled as {item.width_px}x{item.height_px}"
            )
        framed = family.framed(item, frame[None])
        for version, size_px in zip(versions, sizes_px, strict=True):
            version[positions[index]] = resize(framed, size_px)
    return list(versions)


def _check_duration(found_s: float, profiled_s: float) -> None:
    """Headers are a little off: codecs pad, and some containers only estimate. Another clip is something else."""
    if abs(found_s - profiled_s) > _AUDIO_SLACK_S + _AUDIO_SLACK_FRAC * profiled_s:
        raise BadMedia(f"audio is {found_s:.1f} s long but was profiled as {profiled_s:.1f} s")


def resize(frames_THWC: npt.NDArray[np.generic], size_px: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Bicubic resize of every frame to (height, width), as the Hugging Face image processors do it with Pillow."""
    height, width = size_px
    if frames_THWC.shape[1:3] == size_px:
        return frames_THWC.astype(np.uint8, copy=False)
    resized = [Image.fromarray(f).resize((width, height), Image.Resampling.BICUBIC) for f in frames_THWC]
    return np.stack([np.asarray(f, dtype=np.uint8) for f in resized])
