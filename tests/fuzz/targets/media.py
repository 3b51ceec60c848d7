"""Media files of strangers: images, videos and sounds with broken headers and bodies.

A file has a size or a reason; what has a size decodes to that size or has a reason then, and a family places it or says
why not.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo_media import write_audio, write_video
from dflop.data.formats.embedded import NamedBytes
from dflop.data.headers import BadMedia, MediaHeader, read_header
from dflop.models import FAMILIES, load_rules
from dflop.models.media import MediaRules
from tests.fuzz import hostile
from tests.fuzz.target import Target, check_reason

IMAGES = ("rgb.png", "rgb.jpg", "rgb.webp", "rgb.gif", "rgb.bmp", "rgb.tiff", "rgb.ppm", "l.png", "l.jpg", "l.gif",
          "l.bmp", "l.tiff", "l.ppm")  # fmt: skip
CLIPS, SOUNDS = ("clip.mp4", "clip.mkv", "clip.avi"), ("tone.flac", "tone.wav")
_MAX_DECODED_PIXELS = 4_000_000
"""A header may promise more, within the limit; decoding it here would only take time."""


@functools.cache
def samples() -> dict[str, bytes]:
    """Small sound files by name."""
    pixels = Image.fromarray(np.arange(30 * 60 * 3, dtype=np.uint32).reshape(30, 60, 3).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    with tempfile.TemporaryDirectory() as folder:
        for name in IMAGES:
            turned = {"exif": exif} if name.endswith(("png", "jpg", "webp")) else {}
            pixels.convert(name.partition(".")[0].upper()).save(Path(folder) / name, **turned)
        for name in CLIPS:
            write_video([np.full((48, 64, 3), 20 * i, np.uint8) for i in range(6)], Path(folder) / name, Fraction(10))
        for name in SOUNDS:
            write_audio(np.sin(np.arange(8_000) / 5).astype(np.float32) / 2, Path(folder) / name)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@contextlib.contextmanager
def _or_a_reason() -> Iterator[None]:
    try:
        yield
    except BadMedia as error:
        check_reason(error.reason, 400)


@functools.cache
def _families() -> tuple[MediaRules, ...]:
    return tuple(load_rules(name, {}, {}) for name in FAMILIES)


def _read(folder: Path, data: bytes, *, kinds: tuple[str, ...]) -> None:
    path = folder / "media"
    path.write_bytes(data)
    for kind in kinds:
        headers: list[MediaHeader] = []
        for source in (path, NamedBytes(data, "media")):
            with _or_a_reason():
                headers.append(read_header(kind, source))
        for header in headers[:1]:
            assert min(header.width_px, header.height_px, header.duration_s) >= 0
            for family in _families():
                _place(family, header)
            with _or_a_reason():
                _decode(kind, path, header)


def _place(family: MediaRules, header: MediaHeader) -> None:
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


def _broken(*names: str) -> st.SearchStrategy[bytes]:
    return st.deferred(lambda: hostile.broken_bytes(*(samples()[name] for name in names)))


_image, _video, _audio = (partial(_read, kinds=(kind,)) for kind in ("image", "video", "audio"))
_any = partial(_read, kinds=("image", "video", "audio"))
_NOISE = st.binary(max_size=200) | _broken(*IMAGES, *SOUNDS)
TARGETS = (
    Target("image", "bytes of images of seven formats broken", _broken(*IMAGES), _image),
    Target("video", "bytes of MP4, Matroska and AVI broken", _broken(*CLIPS), _video),
    Target("audio", "bytes of FLAC and WAV broken", _broken(*SOUNDS), _audio),
    Target("noise-as-media", "any bytes, read as every kind", _NOISE, _any),
)
