"""One strict reading of what a row means, whichever of the usual formats it is written in.

- LLaVA, ShareGPT: `conversations` of {from, value}; OpenAI: `messages` of {role, content}. Content is a string or a
  list of parts; a media part names its file, or takes the next one of the row's `image`, `video` or `audio` files.
- The Cauldron, FineVision: `texts` of {user, assistant}.
- Alpaca: `instruction`, `input`, `output` and earlier `history` pairs.
- Plain text: `text`, when there is no conversation.

A row with fewer placeholders than media gets the missing ones at the front of its first user turn, as LLaVA does; one
with more is bad. A `system` string of the row is its first turn. Keys not named here are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dflop.data.annotations import (
    MEDIA_KINDS,
    PLACEHOLDER,
    AnnotatedSample,
    BadSample,
    MediaRef,
    Turn,
    printable,
)

MEDIA_KEYS = tuple(key for kind in MEDIA_KINDS for key in (kind, f"{kind}s"))
_LISTS = ("conversations", "messages", "texts")
CONVERSATION_KEYS = (*_LISTS, "instruction", "text")
"""A row has one of these; where it has several, the first counts."""
ROW_KEYS = ("id", "system", *CONVERSATION_KEYS, "input", "output", "history", *MEDIA_KEYS)
"""Every key this reading looks at."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class _Said:
    """A turn, and per placeholder of its text the file named in place; None takes the next of the row's files."""

    role: str
    text: str
    named: tuple[str | None, ...] = ()


def parse_row(row: dict[str, Any], index: int) -> AnnotatedSample:
    """Interpret one row.

    Raises:
        BadSample: unknown role, wrong types, no assistant turn, or placeholders that do not fit the media.
    """
    sample_id = printable(str(index if row.get("id") is None else row["id"]))
    try:
        media = {kind: _paths(row, kind) for kind in MEDIA_KINDS}
        if _key(row) == "text":
            return AnnotatedSample(index, sample_id, (_plain_text(row["text"], media),), ())
        said = _with_missing_placeholders(_conversation(row), media)
        return AnnotatedSample(index, sample_id, tuple(Turn(s.role, s.text) for s in said), tuple(_refs(said, media)))
    except BadSample as error:
        error.sample_id = sample_id
        raise


def _key(row: dict[str, Any]) -> str:
    for key in CONVERSATION_KEYS:
        if row.get(key) is not None:
            return key
    raise BadSample(f"no {', '.join(f'`{key}`' for key in CONVERSATION_KEYS[:-1])} or `{CONVERSATION_KEYS[-1]}`")


def _plain_text(text: object, media: dict[str, tuple[str, ...]]) -> Turn:
    if any(media.values()):
        raise BadSample("a row of plain `text` takes no media: write it as a conversation")
    return Turn("text", _checked(text, "`text`"))


def _conversation(row: dict[str, Any]) -> tuple[_Said, ...]:
    key = _key(row)
    said = tuple(_alpaca(row) if key == "instruction" else _listed(key, row[key]))
    if not said:
        raise BadSample("conversation has no turns")
    system = row.get("system")
    if system and said[0].role != "system":
        said = (_Said("system", _checked(system, "`system`")), *said)
    spoken = [turn.role for turn in said if turn.role != "system"]
    if "assistant" not in spoken:
        raise BadSample("conversation has no assistant turn")
    if spoken[0] == "assistant":
        raise BadSample("conversation starts with an assistant turn")
    return said


def _listed(key: str, raw: object) -> Iterator[_Said]:
    if isinstance(raw, dict) and all(isinstance(v, list) for v in raw.values()):
        # Hugging Face datasets store a sequence of objects as an object of lists.
        if len({len(v) for v in raw.values()}) > 1:
            raise BadSample(f"`{key}` has lists of different lengths")
        raw = [dict(zip(raw, values, strict=True)) for values in zip(*raw.values(), strict=True)]
    if not isinstance(raw, list):
        raise BadSample(f"`{key}` is not a list but a {type(raw).__name__}")
    for number, entry in enumerate(raw):
        if not isinstance(entry, dict):
            raise BadSample(f"turn {number} is not an object but a {type(entry).__name__}")
        if "user" in entry and "assistant" in entry:
            yield _turn(number, "user", entry["user"])
            yield _turn(number, "assistant", entry["assistant"])
        else:
            yield _turn(number, entry.get("from", entry.get("role")), entry.get("value", entry.get("content")))


def _alpaca(row: dict[str, Any]) -> Iterator[_Said]:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadSample("`history` is not a list of pairs")
    asked = [row["instruction"], row.get("input") or ""]
    for number, key in enumerate(("instruction", "input")):
        _checked(asked[number], f"`{key}`")
    for number, (question, answer) in enumerate([*history, ["\n".join(filter(None, asked)), row.get("output")]]):
        yield _turn(2 * number, "user", question)
        yield _turn(2 * number + 1, "assistant", answer)


def _turn(number: int, speaker: object, content: object) -> _Said:
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadSample(f"turn {number} has unknown role {_short(speaker)}; valid: {', '.join(_ROLES)}")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    named: list[str | None] = []
    for part in parts:
        text, files = _part(number, part)
        texts.append(text)
        named += files
    if role != "user" and (misplaced := PLACEHOLDER.search("".join(texts))):
        raise BadSample(f"turn {number} ({role}) holds {misplaced[0]}; media belong to user turns")
    return _Said(role, "".join(texts), tuple(named))


def _part(number: int, part: object) -> tuple[str, list[str | None]]:
    """Text of one part of a turn, and what its placeholders stand for."""
    if not isinstance(part, dict):
        raise BadSample(f"turn {number} has a part that is not an object but a {type(part).__name__}")
    kind = str(part.get("type")).removesuffix("_url")
    if kind == "text":
        text = _checked(part.get("text"), f"turn {number}")
        return text, [None] * len(PLACEHOLDER.findall(text))
    if kind not in MEDIA_KINDS:
        raise BadSample(f"turn {number} has a part of unknown type {_short(part.get('type'))}")
    values = [part[key] for key in (kind, f"{kind}_url", "path", "url") if part.get(key) is not None]
    if values and isinstance(values[0], dict):
        values = [values[0].get("url", values[0].get("path"))]
    if values and (not isinstance(values[0], str) or not values[0]):
        raise BadSample(f"turn {number} has an {kind} part that names no file: {_short(values[0])}")
    return f"<{kind}>", [_local(values[0]) if values else None]


def _with_missing_placeholders(said: tuple[_Said, ...], media: dict[str, tuple[str, ...]]) -> tuple[_Said, ...]:
    found = Counter(kind for kind, path in _placeholders(said) if path is None)
    front: list[str] = []
    for kind, paths in media.items():
        if found[kind] > len(paths):
            raise BadSample(f"{found[kind]} <{kind}> placeholders for {len(paths)} {kind} files")
        front += [f"<{kind}>\n"] * (len(paths) - found[kind])
    first = next(i for i, turn in enumerate(said) if turn.role == "user")
    turn = said[first]
    whole = replace(turn, text="".join(front) + turn.text, named=(None,) * len(front) + turn.named)
    return (*said[:first], whole, *said[first + 1 :])


def _refs(said: tuple[_Said, ...], media: dict[str, tuple[str, ...]]) -> Iterator[MediaRef]:
    queues = {kind: iter(paths) for kind, paths in media.items()}
    for kind, path in _placeholders(said):
        yield MediaRef(kind, next(queues[kind]) if path is None else path)


def _placeholders(said: tuple[_Said, ...]) -> Iterator[tuple[str, str | None]]:
    """(kind, file named in place) of every placeholder, in order."""
    for turn in said:
        if turn.role == "user":
            yield from zip(PLACEHOLDER.findall(turn.text), turn.named, strict=True)


def _paths(row: dict[str, Any], kind: str) -> tuple[str, ...]:
    paths: list[str] = []
    for key in (kind, f"{kind}s"):
        value = row.get(key)
        entries = [] if value is None else value if isinstance(value, list) else [value]
        for entry in entries:
            if not isinstance(entry, str) or not entry:
                raise BadSample(f"`{key}` names no file: {_short(entry)}")
            paths.append(_local(entry))
    return tuple(paths)


def _local(path: str) -> str:
    scheme = path.partition(":")[0].lower()
    if scheme in ("http", "https", "s3", "gs", "data"):
        raise BadSample(f"media are read from files, not from {scheme}: addresses", path=printable(path[:100]))
    return path[len("file://") :] if scheme == "file" and path[4:].startswith("://") else path


def _checked(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise BadSample(f"{what} has no text: its value is {_short(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(f"{what} is not valid Unicode: {error.reason} at character {error.start}") from error
    return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
