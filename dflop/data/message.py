"""One message of a conversation: who speaks, what is said, where its media stand, and whether it is learnt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflop.data.annotations import MEDIA_KINDS, PLACEHOLDER, BadSample
from dflop.data.frame_files import FrameList, frame_list, take_rate
from dflop.data.media_value import Attached, read_value, shortened
from dflop.data.row_keys import INVERSE_MARKS, LOSS_MARKS, KeyReader

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
}
_TOOL_ROLES = (
    "tool", "function", "observation", "function_call", "tool_call", "tool_response", "tool_result", "ipython",
    "environment",
)  # fmt: skip
_FILE_KEYS = ("path", "url", "value", "source", "data", "base64", "bytes")


class Mark(NamedTuple):
    """Something in a text that stands for a media item, or looks as if it did."""

    start: int
    kind: str
    path: str | None
    """The item named in place; None takes the next of the row's."""
    is_sure: bool
    """False of `<image>` in the text part of a list of parts: a placeholder only if files are left for it."""


@dataclass(frozen=True, slots=True)
class Said:
    """A turn, and the marks of its text in order; of other turns than the user's, marks that are text all the same."""

    role: str
    text: str
    marks: tuple[Mark, ...] = ()
    has_loss: bool = True
    cuts: tuple[int, ...] = ()
    """Where a text part ends and another begins."""


class MessageReader:
    """Reads the messages of one row.

    Args:
        keys: Judges their keys.
        prefix: Begins the names of media whose bytes stand in the row.
    """

    def __init__(self, keys: KeyReader, prefix: str) -> None:
        self._keys, self._prefix = keys, prefix
        self.attached: dict[str, Attached | FrameList] = {}
        """Media whose bytes, or lists of frames, stand in the row, by name."""

    def name(self, value: object, kind: str, what: str, fps: float | None = None) -> str | None:
        """Path of the file a value names, or the name of what stands in the row; None where there is nothing.

        Raises:
            BadSample: the value names nothing that is read.
        """
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                self._keys.check(inner, "part", what, (kind,))
        found = (frame_list(value, fps, what) if kind == "video" else None) or read_value(value, what)
        if not isinstance(found, Attached | FrameList):
            return found
        name = f"{self._prefix}.{kind}.{len(self.attached)}"
        self.attached[name] = found
        return name

    def read(self, number: int, entry: dict[str, Any]) -> Iterator[Said]:
        """The turn that a message is, or the question and answer that it holds.

        Raises:
            BadSample: unknown role, wrong types, keys that would change what is learnt.
        """
        kind = entry["type"] if entry.get("type") in MEDIA_KINDS else ""  # NeMo: a turn is a file
        self._keys.check(entry, "message", f"turn {number}", (kind,))
        pair = [role for role in ("user", "assistant") if role in entry]
        if len(pair) == 2:
            yield self.turn(number, "user", entry["user"])
            yield self.turn(number, "assistant", entry["assistant"], self._has_loss(entry, number, "assistant"))
            return
        speaker, content = (_one_of(entry, keys, number) for keys in (("from", "role"), ("value", "content")))
        if kind and not isinstance(content, list):
            content = [{"type": kind, kind: content}]
        yield self.turn(number, speaker, content, self._has_loss(entry, number, _role(speaker)))

    def turn(self, number: int, speaker: object, content: object, has_loss: bool = True) -> Said:
        """A turn of these words.

        Raises:
            BadSample: unknown role or part, wrong types, media in what is not a user's turn.
        """
        role = _role(speaker)
        if isinstance(speaker, str) and speaker in _TOOL_ROLES:
            raise BadSample(f"turn {number} has role {speaker!r}: tool calls and results are not supported")
        if not role:
            raise BadSample(f"turn {number} has unknown role {shortened(speaker)}; valid: {', '.join(_ROLES)}")
        if not isinstance(content, list):
            text = checked(content, f"turn {number}")
            return Said(role, text, _marks(text, 0, True), has_loss)
        text, before = "", ""
        marks: tuple[Mark, ...] = ()
        cuts: tuple[int, ...] = ()
        for part in content:
            said, of_part = self._part(number, part, len(text))
            kind = _kind(number, part)
            if kind == before == "text":
                cuts = (*cuts, len(text))
            text, marks, before = text + said, (*marks, *of_part), kind
        if role != "user" and (media := [mark for mark in marks if mark.is_sure]):
            raise BadSample(f"turn {number} ({role}) holds <{media[0].kind}>; media belong to user turns")
        return Said(role, text, marks, has_loss, cuts)

    def _part(self, number: int, part: object, start: int) -> tuple[str, tuple[Mark, ...]]:
        """Text of one part of a turn, and its marks when it begins at `start`."""
        if not isinstance(part, dict):
            raise BadSample(f"turn {number} has a part that is not an object but a {type(part).__name__}")
        part, fps = take_rate(part, f"turn {number}")
        kinds = [found for key in (*part, str(part.get("type"))) if (found := _of_kind(key))]
        self._keys.check(part, "part", f"turn {number}", kinds)
        kind = _kind(number, part)
        other = [key for key in part if (found := _of_kind(key)) and found != kind and part[key] not in (None, "", [])]
        if other:
            raise BadSample(f"turn {number} has a part of type {kind} that also has `{other[0]}`")
        if kind == "text":
            text = checked(_one_of(part, ("text", "value"), number), f"turn {number}")
            return text, _marks(text, start, False)
        what = f"turn {number} has an {kind} part that" if kind[0] in "ai" else f"turn {number} has a {kind} part that"
        keys = (kind, f"{kind}_url", f"input_{kind}", *_FILE_KEYS)
        values = [part[key] for key in keys if part.get(key) is not None]
        names = dict.fromkeys(name for value in values if (name := self.name(value, kind, what, fps)) is not None)
        if len(names) > 1:
            raise BadSample(f"{what} names several files: {shortened(list(names))}")
        return f"<{kind}>", (Mark(start, kind, next(iter(names), None), True),)

    def _has_loss(self, entry: dict[str, Any], number: int, role: str) -> bool:
        marks = {key: entry[key] for key in LOSS_MARKS if key not in self._keys.ignored and entry.get(key) is not None}
        for key, value in marks.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise BadSample(f"turn {number} has `{key}` {shortened(value)}: must be 0 or 1", key=key)
            if role != "assistant" and bool(value) != (key in INVERSE_MARKS) and key != "weight":
                raise BadSample(f"turn {number} has `{key}` {value!r}, but only answers carry loss", key=key)
        learnt = {bool(value) != (key in INVERSE_MARKS) for key, value in marks.items()}
        if len(learnt) > 1:
            raise BadSample(f"turn {number} has conflicting loss marks: {shortened(marks)}", key=next(iter(marks)))
        return role != "assistant" or all(learnt)


def _role(speaker: object) -> str:
    return _ROLES.get(speaker.lower(), "") if isinstance(speaker, str) else ""


def checked(text: object, what: str) -> str:
    """`text` if it is one.

    Raises:
        BadSample: it is not, or it cannot be written as UTF-8.
    """
    if not isinstance(text, str):
        raise BadSample(f"{what} has no text, but {shortened(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(f"{what} is not valid Unicode: {error.reason} at character {error.start}") from error
    return text


def _marks(text: str, start: int, is_sure: bool) -> tuple[Mark, ...]:
    return tuple(Mark(start + match.start(), match[1], None, is_sure) for match in PLACEHOLDER.finditer(text))


def _kind(number: int, part: dict[str, Any]) -> str:
    """`text` or the kind of media a part is; one without a type is what its one key says."""
    given = part.get("type")
    if given is None:
        kinds = sorted({kind for key in part if part[key] is not None and (kind := _of_kind(key))})
        if len(kinds) != 1:
            raise BadSample(f"turn {number} has a part without a type that holds {' and '.join(kinds) or 'nothing'}")
        return kinds[0]
    if not (kind := _of_kind(str(given))):
        raise BadSample(f"turn {number} has a part of unknown type {shortened(given)}")
    return kind


def _of_kind(key: str) -> str:
    kind = key.removeprefix("input_").removesuffix("_url")
    return kind if kind in ("text", *MEDIA_KINDS) else ""


def _one_of(entry: dict[str, Any], keys: tuple[str, str], number: int) -> object:
    """The value of the one key of two that says something."""
    values = [entry[key] for key in keys if entry.get(key) is not None]
    if len(values) > 1 and values[0] != values[1]:
        raise BadSample(f"turn {number} has both `{keys[0]}` and `{keys[1]}`, which differ")
    return values[0] if values else None
