"""What a value that stands for a media item names: a file, or the bytes themselves.

Bytes stand in a row as bytes (Parquet), as base64, as a `data:` address, or as `bytes` of an object whose `path` is
then a name only.
"""

from __future__ import annotations

import base64
import binascii
import re
import urllib.parse
from dataclasses import dataclass
from typing import Any

from dflop.data.annotations import BadSample, printable

EXTENSIONS = {
    "image": ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"),
    "video": ("mp4", "m4v", "webm", "mkv", "avi", "mov", "mpg", "mpeg", "ts", "flv", "wmv", "3gp", "ogv"),
    "audio": (
        "mp3", "wav", "flac", "ogg", "oga", "opus", "m4a", "aac", "aif", "aiff", "aifc", "au", "amr", "wma", "w64",
    ),
}  # fmt: skip
"""Suffixes of files we read, by kind."""

_SUFFIXES = [e for of_kind in EXTENSIONS.values() for e in of_kind if e not in ("ts", "au")]
"""Without those of TypeScript and of Australia."""
_NAMED = re.compile(rf"[^\n]{{0,500}}\.({'|'.join(_SUFFIXES)})", re.IGNORECASE)
_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "T2dnUw", "SUkqA", "TU0AK")
"""How JPEG, PNG, GIF, RIFF, Ogg and TIFF begin."""
_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"OggS", b"fLaC", b"ID3", b"\x1aE\xdf\xa3")
_LONGEST_NAME = 255
_SCHEMES = ("http", "https", "s3", "gs", "hf", "oss", "ftp", "azure", "abfs")


@dataclass(frozen=True, slots=True)
class Attached:
    """A media item whose bytes stand in its row."""

    content: bytes | str
    """The bytes, or base64 of them."""
    name: str
    """What it is called; only its suffix matters."""

    @property
    def names(self) -> tuple[str, ...]:
        """As `FrameList.names`."""
        return (self.name,)

    def decoded(self) -> bytes:
        """The bytes.

        Raises:
            BadSample: the text is no base64.
        """
        if isinstance(self.content, bytes):
            return self.content
        try:
            text = "".join(self.content.split())
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadSample(f"invalid base64: {error}", path=printable(self.name[:100])) from error


def read_value(value: object, what: str) -> str | Attached | None:
    """What a value names; None where there is nothing.

    Args:
        value: A path, bytes, base64, a `data:` address, or an object with one of these.
        what: Subject of the reason.

    Raises:
        BadSample: an address we do not fetch, or nothing of these kinds.
    """
    if value is None:
        return None
    if isinstance(value, bytes):
        return Attached(value, "")
    if isinstance(value, dict):
        return _of_object(value, what)
    if isinstance(value, str) and value:
        return _of_text(value)
    if isinstance(value, list) and value:
        raise BadSample(f"{what} names {len(value)} files in a list where one is expected")
    raise BadSample(f"{what} names no file: {shortened(value)}")


def is_media(value: object) -> bool:
    """Whether a value holds the bytes of a media file, or a list of such."""
    if isinstance(value, bytes):
        return value.startswith(_STARTS) or value[4:8] == b"ftyp"
    if isinstance(value, str):
        return value.startswith(("data:image/", "data:video/", "data:audio/"))
    if isinstance(value, dict | list):
        return any(map(is_media, value.values() if isinstance(value, dict) else value))
    return False


def is_media_like(value: object) -> bool:
    """Whether a value of a key that is not known looks like media."""
    if isinstance(value, bytes):
        return True
    if isinstance(value, str):
        return bool(_NAMED.fullmatch(value)) or is_media(value)
    if isinstance(value, dict):
        return value.get("bytes") is not None or (value.keys() <= {"bytes", "path"} and bool(value.get("path")))
    return isinstance(value, list) and any(map(is_media_like, value))


def shortened(value: object) -> str:
    """A value in a line of a reason."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_object(value: dict[str, Any], what: str) -> str | Attached | None:
    path = value.get("path")
    for key in ("bytes", "data", "base64"):
        if (content := value.get(key)) is not None:
            if not isinstance(content, bytes | str):
                raise BadSample(f"{what} has `{key}` of type {type(content).__name__}, not bytes or base64")
            if isinstance(content, str) and content.startswith("data:"):
                return _of_text(content)
            suffix = value.get("format") or str(value.get("media_type") or "").rpartition("/")[2]
            return Attached(content, str(path or f"x.{suffix}"))
    given = [value[key] for key in ("url", "path") if value.get(key) is not None]
    if len(given) > 1 and given[0] != given[1]:
        raise BadSample(f"{what} names two files: {shortened(given)}")
    if not given and any(inner is not None for inner in value.values()):
        raise BadSample(f"{what} names no file: {shortened(value)}")
    return read_value(given[0], what) if given else None


def _of_text(text: str) -> str | Attached:
    if match := _DATA.match(text):
        suffix = match[1].rpartition("/")[2].removeprefix("x-").lower()
        content = text[match.end() :]
        is_base64 = match[2].lower().endswith(";base64")
        return Attached(content if is_base64 else urllib.parse.unquote_to_bytes(content), f"x.{suffix}")
    if len(text) > _LONGEST_NAME and text.startswith(_BASE64_STARTS):
        return Attached(text, "")
    scheme = text.partition(":")[0].lower()
    if scheme in (*_SCHEMES, "data"):
        raise BadSample(f"media are read from local files, not from {scheme}: URLs", path=printable(text[:100]))
    return text[len("file://") :] if scheme == "file" and text[4:].startswith("://") else text
