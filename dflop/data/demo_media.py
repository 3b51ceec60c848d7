"""Makes the demo's media from shipped files: crops of photos, pans and cuts as video, cuts and joins of sounds.

Sizes are heavy-tailed on purpose (lognormal, clipped): a scheduler has nothing to do on a dataset of equals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
SAMPLE_RATE_HZ = 16_000


def lognormal(rng: np.random.Generator, median: float, sigma: float, low: float, high: float) -> float:
    """One draw of a clipped lognormal."""
    return float(np.clip(median * np.exp(sigma * rng.standard_normal()), low, high))


def image_size(rng: np.random.Generator, median_px: float) -> tuple[int, int]:
    """(width, height): the long side lognormal in 56..1200 px, the aspect ratio in 1:2..2:1."""
    long_px = lognormal(rng, median_px, 0.7, 56, 1200)
    aspect = lognormal(rng, 1.2, 0.3, 0.5, 2.0)
    return max(56, round(long_px * min(aspect, 1))), max(56, round(long_px / max(aspect, 1)))


def video_size(rng: np.random.Generator) -> tuple[int, int]:
    """(width, height), both even as yuv420p wants: long side 224..480 px in one of four common shapes."""
    long_px = lognormal(rng, 300, 0.3, 224, 480)
    across, down = ((16, 9), (4, 3), (1, 1), (9, 16))[rng.integers(4)]
    scale = long_px / max(across, down)
    return round(across * scale / 2) * 2, round(down * scale / 2) * 2


def crop(rng: np.random.Generator, photo: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A random part of a photo, at least half of its largest crop of that shape, resized to `size`."""
    scale = min(photo.width / size[0], photo.height / size[1]) * rng.uniform(0.5, 1.0)
    width, height = size[0] * scale, size[1] * scale
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    return photo.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))


def pan(rng: np.random.Generator, photo: Image.Image, size: tuple[int, int], num_frames: int) -> Iterator[Pixels]:
    """Frames of a camera moving in a straight line over a photo."""
    scale = max(size[0] * 1.6 / photo.width, size[1] * 1.6 / photo.height)
    canvas = np.asarray(photo.resize((round(photo.width * scale), round(photo.height * scale))))
    room = np.array([canvas.shape[0] - size[1], canvas.shape[1] - size[0]])
    begin, end = rng.uniform(0, 1, 2) * room, rng.uniform(0, 1, 2) * room
    for progress in np.linspace(0, 1, num_frames):
        top, left = np.round(begin + (end - begin) * progress).astype(int)
        yield np.ascontiguousarray(canvas[top : top + size[1], left : left + size[0]])


def write_video(frames: Iterable[Pixels], path: Path, fps: Fraction) -> None:
    """Write an MP4 with H.264, or MPEG-4 part 2 where FFmpeg was built without libx264."""
    codec = "libx264" if "libx264" in av.codec.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        assert isinstance(stream, av.VideoStream)
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        if codec == "libx264":
            # Measured with PyAV 18.1: with macroblock-tree rate control the same frames give other bytes each run.
            stream.options = {"preset": "veryfast", "crf": "28", "x264-params": "mbtree=0"}
        for number, pixels in enumerate(frames):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def write_audio(samples: npt.NDArray[np.float32], path: Path) -> None:
    """Write mono 16-bit FLAC at `SAMPLE_RATE_HZ`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("flac", rate=SAMPLE_RATE_HZ, layout="mono", format="s16")
        assert isinstance(stream, av.AudioStream)
        quantised = np.round(np.clip(samples, -1, 1) * 32767).astype(np.int16)
        for start in range(0, len(quantised), 4096):
            block = np.ascontiguousarray(quantised[None, start : start + 4096])
            frame = av.AudioFrame.from_ndarray(block, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE_HZ, start, Fraction(1, SAMPLE_RATE_HZ)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
