"""Media files of strangers: images, videos and sounds with broken headers and bodies.

A file has a size or a reason; what has a size decodes to that size or has a reason then, and a family places it or says
why not.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Callable
from fractions import Fraction
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
from tests.fuzz.target import Target

_MAX_DECODED_PIXELS = 4_000_000
"""A header may promise more, within the limit; decoding it here would only take time."""


@functools.cache
def _images() -> tuple[bytes, ...]:
    pixels = Image.fromarray(np.arange(16 * 24 * 3, dtype=np.uint16).reshape(16, 24, 3).astype(np.uint8))
    found = []
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        for mode in ("RGB", "L") if form != "WEBP" else ("RGB",):
            out = io.BytesIO()
            exif = Image.Exif()
            exif[0x0112] = 6
            pixels.convert(mode).save(out, form, **({"exif": exif} if form in ("PNG", "JPEG", "WEBP") else {}))
            found.append(out.getvalue())
    return tuple(found)


@functools.cache
def clips() -> tuple[bytes, ...]:
    frames = [np.full((16, 16, 3), 40 * i, np.uint8) for i in range(4)]
    return _written((".mp4", ".mkv", ".avi"), lambda path: write_video(frames, path, Fraction(5)))


@functools.cache
def _sounds() -> tuple[bytes, ...]:
    wave = np.sin(np.arange(1600) / 5).astype(np.float32) / 2
    return _written((".flac", ".wav"), lambda path: write_audio(wave, path))


def _written(suffixes: tuple[str, ...], write: Callable[[Path], None]) -> tuple[bytes, ...]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix in suffixes:
            path = Path(folder) / f"a{suffix}"
            write(path)
            found.append(path.read_bytes())
    return tuple(found)


def _of_kind(kind: str) -> Callable[[Path], Callable[[Any], None]]:
    def prepare(folder: Path) -> Callable[[Any], None]:
        rules = [load_rules(name, {}, {}) for name in FAMILIES]

        def check(data: bytes) -> None:
            path = folder / "media"
            path.write_bytes(data)
            headers = []
            for source in (path, NamedBytes(data, "media")):
                try:
                    headers.append(read_header(kind, source))
                except BadMedia as error:
                    _check_reason(error)
            if not headers:
                return
            header = headers[0]
            assert min(header.width_px, header.height_px, header.duration_s) >= 0
            for family in rules:
                if kind in family.media_tokens:
                    _place(family, header)
            _decode(kind, path, header)

        return check

    return prepare


def _place(family: Any, header: MediaHeader) -> None:
    try:
        placed = family.place(
            header.kind, width_px=header.width_px, height_px=header.height_px, num_frames=header.num_frames,
            duration_s=header.duration_s,
        )  # fmt: skip
    except ValueError:
        return
    assert min(placed.num_rows, placed.num_tokens) > 0
    assert sum(n for n in placed.layout if isinstance(n, int)) == placed.num_rows
    assert placed.sum_sq_tokens < 2**63, "squared lengths that no table holds"


def _decode(kind: str, path: Path, header: MediaHeader) -> None:
    try:
        if kind == "audio":
            assert decode_audio(path, 16_000).ndim == 1
        elif header.width_px * header.height_px > _MAX_DECODED_PIXELS:
            return
        elif kind == "image":
            assert decode_image(path).shape == (header.height_px, header.width_px, 3)
        else:
            decode_video(path, [0, min(2, header.num_frames - 1)])
    except BadMedia as error:
        _check_reason(error)


def _check_reason(error: BadMedia) -> None:
    assert error.reason.strip()
    assert len(error.reason.splitlines()) == 1
    assert len(error.reason) < 400


TARGETS = (
    Target(
        "image", "bytes of images of seven formats broken", lambda: hostile.broken_bytes(_images()), _of_kind("image")
    ),
    Target("video", "bytes of MP4, Matroska and AVI broken", lambda: hostile.broken_bytes(clips()), _of_kind("video")),
    Target("audio", "bytes of FLAC and WAV broken", lambda: hostile.broken_bytes(_sounds()), _of_kind("audio")),
    Target(
        "noise-as-media",
        "any bytes, read as every kind",
        lambda: st.binary(max_size=200) | hostile.broken_bytes((*_images(), *_sounds())),
        lambda folder: _each(folder),
    ),
)


def _each(folder: Path) -> Callable[[Any], None]:
    checks = []
    for kind in ("image", "video", "audio"):
        (folder / kind).mkdir()
        checks.append(_of_kind(kind)(folder / kind))

    def check(data: bytes) -> None:
        for one in checks:
            one(data)

    return check
