"""What one row of a training set says: turns of text and the media they speak of. `conversation.py` reads rows.

Placeholders (`<image>`, `<video>`, `<audio>`) tie media to places in user turns, one each, in order. A malformed row is
a fact about that row, never about its file: reading it raises `BadSample`, whose reason becomes the quarantine record.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

MEDIA_KINDS = ("image", "video", "audio")
PLACEHOLDER = re.compile(r"<(image|video|audio)>")


class BadSample(ValueError):
    """A row that cannot be trained on.

    Args:
        reason: One line for the quarantine record.
        path: The media file at fault, relative to the media root; empty when the row itself is.
        sample_id: The row's id where it could be read.
        key: The key of the row at fault, where one would change what is learnt.
    """

    def __init__(self, reason: str, *, path: str = "", sample_id: str = "", key: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.sample_id = sample_id
        self.key = key


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; `role` is `system`, `user` or `assistant`.

    A sample of plain text is the one turn of role `text`: no chat template, every token supervised, and what looks
    like a placeholder in it is text.
    """

    role: str
    text: str
    literal: tuple[int, ...] = ()
    """Offsets in a user turn's `text` of what looks like a placeholder and is none. Other turns are text alone."""
    has_loss: bool = True
    """Whether an answer is learnt."""
    cuts: tuple[int, ...] = ()
    """Where in `text` a text part ends and another begins."""

    def pieces(self) -> list[str]:
        """The text cut at its placeholders: text, kind of media, text, ..., text."""
        pieces, at = [], 0
        for match in PLACEHOLDER.finditer(self.text) if self.role == "user" else ():
            if match.start() not in self.literal:
                pieces += [self.text[at : match.start()], match[1]]
                at = match.end()
        return [*pieces, self.text[at:]]


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A media item a row names; `path` is not yet checked.

    It is relative to the media root, or names bytes inside the container that holds the row: `shard.tar/a.jpg`,
    `part.parquet#12.image.0` (item 0 of row 12). The row's source tells the two apart and opens either.
    """

    kind: str
    path: str
    frames: tuple[str, ...] = ()
    """Paths of a video's frames that lie as pictures, or of their folder. `path` names the list in its row."""


@dataclass(frozen=True, slots=True)
class AnnotatedSample:
    """One well-formed row: its user turns hold exactly one placeholder per entry of `media`, in the same order."""

    sample_index: int
    sample_id: str
    turns: tuple[Turn, ...]
    media: tuple[MediaRef, ...]
    unknown_keys: tuple[str, ...] = ()
    """Keys of the row that mean nothing to us and, as far as we know, to nobody; sorted."""
    durations: tuple[tuple[str, float], ...] = ()
    """Keys that say how long a recording is, and what they say, in seconds if it is true."""
    named: tuple[tuple[str, str], ...] = ()
    """What else looks like the name of a media file in the row, with its keys, see `ledger.py`."""


def confine(media_root: Path, relative: str) -> Path:
    """Path of a media file, refused unless its name leads below `media_root`.

    Links that stand in the media root are followed, wherever they lead: a folder of pictures on another disk, or the
    blobs of a Hugging Face cache. Names of rows are not: `..` is resolved before any link is. A link that another user
    made does not lead to a file of the user who runs this.

    Args:
        media_root: Folder of the media.
        relative: Path from there; an absolute one is taken where it leads there.

    Raises:
        BadSample: a name that leaves the root or that no file can have, or such a link.
    """
    try:
        real = os.path.realpath(media_root)
        for root in (real, os.path.abspath(media_root)):
            path = os.path.normpath(os.path.join(root, relative))
            if os.path.commonpath([root, path]) == root:
                break
        else:
            root, path = real, os.path.realpath(path)
    except ValueError as error:
        raise BadSample(f"invalid media path: {error}", path=printable(relative)) from error
    if os.path.commonpath([root, path]) != root:
        raise BadSample(f"media path leaves the media root {root}", path=printable(relative))
    _check_links(root, path)
    return Path(path)


def _check_links(root: str, path: str) -> None:
    """Raise `BadSample` where a link of another user leads from the root to a file of this one."""
    try:
        parts = path[len(root) :].strip("/").split("/")
        found = map(os.lstat, itertools.accumulate(parts, os.path.join, initial=root))
        makers = {status.st_uid for status in found if stat.S_ISLNK(status.st_mode)} - {0, os.getuid()}
        is_own = bool(makers) and os.stat(path).st_uid == os.getuid()
    except OSError:
        return  # opening it will say what is wrong
    except ValueError as error:
        raise BadSample(f"invalid media path: {error}", path=printable(path)) from error
    if is_own:
        raise BadSample(
            f"a link made by another user (uid {min(makers)}) leads to a file of yours", path=printable(path)
        )


def printable(text: str) -> str:
    """Text with what cannot be stored as UTF-8 (lone surrogates from JSON escapes) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
