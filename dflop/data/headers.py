"""Sizes of media files from their headers: what the profiler needs, without decoding a pixel or a sample.

Measured on warm files: 0.1 ms per image, 0.3-3 ms per audio clip, 1.5-16 ms per video, where decoding takes 1-300 ms.
That is what makes profiling millions of samples a matter of minutes on a few nodes. The price: a file whose header is
sound and whose body is damaged is found only in training, by `decode.py`. Where a header states no length, only guesses
one or is known to lie, packets are counted, or what decoding gives (`packets.py`); sizes are those of the picture as it
is shown (`rotation.py`).

Files are hostile until read: only regular files are opened, only the formats listed here are probed (no playlists, no
PostScript, no network protocol), and the pixel count of an image or a video's frame is checked before anything is
allocated.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import av
import av.error
import numpy as np
from av.container import InputContainer
from PIL import Image, UnidentifiedImageError

from dflop.data.packets import count_audio, count_video, states_audio_length
from dflop.data.rotation import OddAngle, states_a_turn, turn_of
from dflop.models.media import MediaHeader

MediaSource = Path | BinaryIO
"""A file, or one already open (bytes inside a container, in memory or not), which whoever reads it closes."""

MAX_IMAGE_PIXELS = 178_000_000
"""About 500 MiB as RGB; just under the size at which Pillow itself refuses to open a file."""

MAX_FRAME_PIXELS = 8192 * 8192
"""Pixels of a video frame, twice 8K: 192 MiB as RGB. A file of some kilobytes can state, and hold, any size."""

MAX_LEVEL = 255

_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf,gif,ogg,wav,w64,mp3,flac,aac,aiff,au,amr"
_EXIF_ORIENTATION = 0x0112
_WAV_PROBE_BYTES = "4096"


class BadMedia(ValueError):
    """A media file that cannot be used; `reason` is the line for the quarantine record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_header(kind: str, source: MediaSource) -> MediaHeader:
    """Size of an `image`, `video` or `audio`, from its header.

    Raises:
        BadMedia: no such file, not a file of that kind, or nothing in it.
        KeyError: unknown kind.
    """
    if kind == "image":
        with open_image(source) as image:
            width_px, height_px = image.size
            check_depth(image)
            if orientation(image) >= 5:
                width_px, height_px = height_px, width_px
            return MediaHeader(kind, width_px, height_px, 1, 0.0)
    reader = {"video": _video_header, "audio": _audio_header}[kind]
    with open_container(source, only_header=True) as container:
        return reader(container, source)


@contextmanager
def open_image(source: MediaSource) -> Iterator[Image.Image]:
    """An image opened up to its header; whatever Pillow raises on a bad file leaves as `BadMedia`.

    Raises:
        BadMedia: missing, no image, too large, or broken.
    """
    try:
        _check(source)
        with warnings.catch_warnings():
            # Pillow warns from half its own limit; ours is explicit and checked just below.
            warnings.simplefilter("ignore")
            image = Image.open(source, formats=_IMAGE_FORMATS)
            with image:
                if image.width * image.height > MAX_IMAGE_PIXELS:
                    raise BadMedia(
                        f"image of {image.width} x {image.height} px exceeds the limit of {MAX_IMAGE_PIXELS} px"
                    )
                yield image
    except (BadMedia, MemoryError):
        raise  # out of memory says something of the machine, not of a file this far below the pixel limit
    except UnidentifiedImageError as error:
        raise BadMedia(f"not an image in any of {', '.join(_IMAGE_FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise BadMedia(f"image too large: {str(error).split(', could be')[0]}") from error
    except Exception as error:
        # Pillow's parsers raise anything from struct.error to KeyError on crafted bytes; each is one bad file.
        raise BadMedia(f"broken image: {_one_line(error)}") from error
    finally:
        _close(source)


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1-8 as known from the header; 1 when absent or unreadable, as viewers do."""
    try:
        # The base method on purpose: PNG's own override decodes the whole image to look for a late EXIF chunk.
        value = Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
        return 1
    return value if value in range(1, 9) else 1


def check_depth(image: Image.Image) -> None:
    """Refuse 32-bit integers and floats that are no 8-bit levels: what is white in them, the file does not say.

    Pillow shows them clipped to 0-255, so a depth map of millimetres is all white and one of 0-1 all black. Only such
    images, which are rare, are decoded for this.

    Raises:
        BadMedia: a level is outside 0-255 or not a number, or floats are all within 0-1.
    """
    if image.mode not in ("I", "F") or is_16_bit_grey(image):
        return
    levels = np.asarray(image)
    lowest, highest = float(levels.min()), float(levels.max())
    kind = "32-bit integer" if image.mode == "I" else "float"
    if not 0 <= lowest <= highest <= MAX_LEVEL or (image.mode == "F" and 0 < highest <= 1):
        raise BadMedia(
            f"{kind} image with levels of {lowest:g} to {highest:g}, not 0 to {MAX_LEVEL}: convert it to 8 bits"
        )


def is_16_bit_grey(image: Image.Image) -> bool:
    """Whether levels of a grey image run to 65535; of PGM with more than 8 bits, Pillow scales them to that."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


@contextmanager
def open_container(source: MediaSource, *, only_header: bool = False) -> Iterator[InputContainer]:
    """An audio or video container; whatever FFmpeg raises on a bad file leaves as `BadMedia`.

    Args:
        source: File.
        only_header: Look no further into the file than its header needs, where that is known: of WAV, whose header
            says everything, FFmpeg would still read and analyse 5 MB, which takes three times as long.

    Raises:
        BadMedia: missing, of no listed kind, or broken.
    """
    # A file that is open already needs no protocol, and what it names is never opened.
    protocols = "file" if isinstance(source, Path) else "none"
    options = {"protocol_whitelist": protocols, "format_whitelist": _CONTAINERS}
    try:
        _check(source)
        if only_header and _is_wav(source):
            options["probesize"] = _WAV_PROBE_BYTES
        with av.open(
            str(source) if isinstance(source, Path) else source, "r", options=options, metadata_errors="replace"
        ) as container:
            yield container
    except (av.error.FFmpegError, OSError, UnicodeError) as error:
        raise BadMedia(f"broken container: {_one_line(error)}") from error
    finally:
        _close(source)


def video_stream(container: InputContainer) -> av.VideoStream:
    """The first moving-picture stream; cover art does not count.

    Raises:
        BadMedia: there is none, or nothing decodes it.
    """
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            _check_codec(stream)
            return stream
    raise BadMedia("no video stream")


def audio_stream(container: InputContainer) -> av.AudioStream:
    """The first audio stream.

    Raises:
        BadMedia: there is none, or nothing decodes it.
    """
    if not container.streams.audio:
        raise BadMedia("no audio stream")
    _check_codec(container.streams.audio[0])
    return container.streams.audio[0]


def _check_codec(stream: av.VideoStream | av.AudioStream) -> None:
    # Without a decoder PyAV has no codec context, and every question about the stream is an AttributeError.
    if stream.codec_context is None:
        raise BadMedia(f"{stream.type} stream with an unknown codec")


def _video_header(container: InputContainer, source: MediaSource) -> MediaHeader:
    stream = video_stream(container)
    if stream.width <= 0 or stream.height <= 0:
        raise BadMedia("video stream states no size")
    if stream.width * stream.height > MAX_FRAME_PIXELS:
        raise BadMedia(
            f"video of {stream.width} x {stream.height} px exceeds the limit of {MAX_FRAME_PIXELS} px per frame"
        )
    limit_frames(stream)
    num_frames, duration_s = stream.frames, _stated_duration_s(container, stream)
    if (counted := count_video(container, stream)) is not None:
        num_frames, duration_s = counted[0], counted[1] or duration_s
    if num_frames <= 0:
        raise BadMedia("video stream has zero frames")
    if duration_s <= 0 and stream.average_rate:
        duration_s = float(num_frames / stream.average_rate)
    size = (
        (stream.height, stream.width) if _lies_on_its_side(container, stream, source) else (stream.width, stream.height)
    )
    return MediaHeader("video", *size, num_frames, duration_s)


def limit_frames(stream: av.VideoStream) -> None:
    """Let the decoder refuse frames above the limit, whatever the header says."""
    stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}


def _lies_on_its_side(container: InputContainer, stream: av.VideoStream, source: MediaSource) -> bool:
    with _bytes_of(source) as file:
        if not states_a_turn(file, container.format.name):
            return False
    container.seek(0)  # packets were read on the way here
    for frame in container.decode(stream):
        try:
            return turn_of(frame).is_quarter
        except OddAngle as error:
            raise BadMedia(str(error)) from error
    raise BadMedia("no frame of the video can be decoded")


def _audio_header(container: InputContainer, source: MediaSource) -> MediaHeader:
    stream = audio_stream(container)
    with _bytes_of(source) as file:
        is_stated = states_audio_length(container, stream, file)
    duration_s = _stated_duration_s(container, stream) if is_stated else count_audio(container, stream)
    if duration_s <= 0:
        raise BadMedia("no audio samples")
    return MediaHeader("audio", 0, 0, 0, duration_s)


def _stated_duration_s(container: InputContainer, stream: av.VideoStream | av.AudioStream) -> float:
    if stream.duration and stream.time_base:
        return max(0.0, float(stream.duration * stream.time_base))
    return max(0.0, (container.duration or 0) / av.time_base)


@contextmanager
def _bytes_of(source: MediaSource) -> Iterator[BinaryIO]:
    """The content of a source that a container reads, which finds its place again afterwards."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield file
        return
    position = source.tell()
    try:
        yield source
    finally:
        source.seek(position)


def _check(source: MediaSource) -> None:
    # A FIFO or device would block or never end, so the type of a path is checked before anything is opened.
    try:
        if isinstance(source, Path):
            if not source.exists():
                raise BadMedia("file not found")
            if not source.is_file():
                raise BadMedia("not a regular file")
        size_bytes = source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)
        if size_bytes == 0:
            raise BadMedia("empty file (0 bytes)")
        if not isinstance(source, Path):
            source.seek(0)
    except OSError as error:
        raise BadMedia(f"file cannot be read: {error.strerror}") from error


def _is_wav(source: MediaSource) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return _is_wav(file)
    start = source.read(12)
    source.seek(0)
    return start[:4] == b"RIFF" and start[8:] == b"WAVE"


def _close(source: MediaSource) -> None:
    if not isinstance(source, Path):
        source.close()


def _one_line(error: BaseException) -> str:
    """Message of a library's error without the path, which the quarantine row already has."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]
