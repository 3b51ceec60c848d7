"""Media files of strangers: images, videos and sounds with broken headers and bodies.

A file has a size or a reason; what has a size decodes to that size or has a reason then, and a family places it or says
why not.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo_media import write_audio, write_video
from dflop.data.formats.embedded import NamedBytes
from dflop.data.headers import BadMedia, MediaHeader, read_header
from dflop.models import FAMILIES, load_rules
from tests.fuzz import hostile
from tests.fuzz.target import Strategy, Target, check_reason

_MAX_DECODED_PIXELS = 4_000_000
"""A header may promise more, within the limit; decoding it here would only take time."""


@functools.cache
def _images() -> tuple[bytes, ...]:
    pixels = Image.fromarray(np.arange(16 * 24 * 3, dtype=np.uint16).reshape(16, 24, 3).astype(np.uint8))
    exif, found = Image.Exif(), []
    exif[0x0112] = 6
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        for mode in ("RGB", "L") if form != "WEBP" else ("RGB",):
            out = io.BytesIO()
            pixels.convert(mode).save(out, form, **({"exif": exif} if form in ("PNG", "JPEG", "WEBP") else {}))
            found.append(out.getvalue())
    return tuple(found)


def _written(write: Callable[[Path], None], *names: str) -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in names]
        for path in paths:
            write(path)
        return tuple(path.read_bytes() for path in paths)


@functools.cache
def clips() -> tuple[bytes, ...]:
    frames = [np.full((16, 16, 3), 40 * i, np.uint8) for i in range(4)]
    return _written(lambda path: write_video(frames, path, Fraction(5)), "a.mp4", "a.mkv", "a.avi")


@functools.cache
def _sounds() -> tuple[bytes, ...]:
    wave = np.sin(np.arange(1600) / 5).astype(np.float32) / 2
    return _written(lambda path: write_audio(wave, path), "a.flac", "a.wav")


@contextlib.contextmanager
def _or_a_reason() -> Iterator[None]:
    try:
        yield
    except BadMedia as error:
        check_reason(error.reason, 400)


def _read(folder: Path, data: bytes, *, kinds: tuple[str, ...]) -> None:
    path = folder / "media"
    path.write_bytes(data)
    for kind in kinds:
        headers: list[MediaHeader] = []
        for source in (path, NamedBytes(data, "media")):
            with _or_a_reason():
                headers.append(read_header(kind, source))
        if headers:
            header = headers[0]
            assert min(header.width_px, header.height_px, header.duration_s) >= 0
            for name in FAMILIES:
                _place(load_rules(name, {}, {}), header)
            with _or_a_reason():
                _decode(kind, path, header)


def _place(family: Any, header: MediaHeader) -> None:
    if header.kind not in family.media_tokens:
        return
    sizes = {"width_px": header.width_px, "height_px": header.height_px, "num_frames": header.num_frames}
    try:
        placed = family.place(header.kind, **sizes, duration_s=header.duration_s)
    except ValueError:
        return
    assert min(placed.num_rows, placed.num_tokens) > 0
    assert sum(n for n in placed.layout if isinstance(n, int)) == placed.num_rows
    assert placed.sum_sq_tokens < 2**63, "squared lengths that no table holds"


def _decode(kind: str, path: Path, header: MediaHeader) -> None:
    if kind == "audio":
        assert decode_audio(path, 16_000).ndim == 1
    elif header.width_px * header.height_px > _MAX_DECODED_PIXELS:
        return
    elif kind == "image":
        assert decode_image(path).shape == (header.height_px, header.width_px, 3)
    else:
        decode_video(path, [0, min(2, header.num_frames - 1)])


def _noise() -> Strategy:
    return st.binary(max_size=200) | hostile.broken_bytes((*_images(), *_sounds()))


def _of(sound: Callable[[], tuple[bytes, ...]]) -> Callable[[], Strategy]:
    return lambda: hostile.broken_bytes(sound())


_image, _video, _audio = (partial(_read, kinds=(kind,)) for kind in ("image", "video", "audio"))
_any = partial(_read, kinds=("image", "video", "audio"))
TARGETS = (
    Target("image", "bytes of images of seven formats broken", _of(_images), _image),
    Target("video", "bytes of MP4, Matroska and AVI broken", _of(clips), _video),
    Target("audio", "bytes of FLAC and WAV broken", _of(_sounds), _audio),
    Target("noise-as-media", "any bytes, read as every kind", _noise, _any),
)
