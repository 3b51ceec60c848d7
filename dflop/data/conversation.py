"""One strict reading of what a row means, whichever of the usual formats it is written in.

- LLaVA, ShareGPT: `conversations` of {from, value}; OpenAI: `messages` of {role, content}; either may be JSON in a
  string. Content is a string or a list of parts; a media part names its file or holds its bytes, or takes the next one
  of the row's `image`, `video` or `audio` files.
- The Cauldron, FineVision: `texts` of {user, assistant}.
- A question and its answer in columns: `instruction` (Alpaca, with `input` and earlier `history` pairs), `prompt`,
  `query` or `question`; and `output`, `completion`, `response` or `answer`. Either may be a list of messages, as TRL
  has it; then of those in the prompt none is learnt.
- Media and their caption, which is the answer: `text`, `caption`, `sentence`, `transcription` or `transcript`.
- Plain text: `text`, when there are neither a conversation nor media.

`<image>` in a user's text is a placeholder; in the text part of a list of parts it is one only if the row has files
left for it; in answers and system prompts it is text. A row with fewer placeholders than media gets the missing ones at
the front of its first user turn, as LLaVA does; one with more is bad. A `system` string of the row is its first turn.
Which other keys a row may have is `row_keys.py`'s business.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflop.data.annotations import MEDIA_KINDS, PLACEHOLDER, AnnotatedSample, BadSample, MediaRef, Turn, printable
from dflop.data.frame_files import FrameList, entries_of, take_rates
from dflop.data.ledger import names_in
from dflop.data.marks import Files, place_marks
from dflop.data.media_value import Attached, shortened
from dflop.data.message import Mark, MessageReader, Said, checked
from dflop.data.row_keys import ANSWERS, ASKS, BESIDE_QUESTIONS, CAPTIONS, CONVERSATION_KEYS, LISTS, KeyReader


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row and what stands in it besides text."""

    sample: AnnotatedSample
    attached: dict[str, Attached | FrameList]
    """Media whose bytes, or lists of frames, stand in the row, by the names that the sample has for them."""


def read_row(row: dict[str, Any], index: int, container: str, ignored_keys: Collection[str] = ()) -> ReadRow:
    """Interpret one row.

    Args:
        row: It.
        index: Its number.
        container: File that holds it; begins the names of media whose bytes stand in the row.
        ignored_keys: Keys that may be ignored besides those of `row_keys.py`.

    Raises:
        BadSample: unknown role, wrong types, no assistant turn, placeholders that do not fit the media, or a key that
            is not followed and would change what is learnt.
    """
    sample_id = printable(str(index if row.get("id") is None else row["id"]))
    keys = KeyReader(ignored_keys)
    messages = MessageReader(keys, f"{container}#{index}")
    try:
        given, (row, rates) = row, take_rates(row)
        keys.check(row, "row", "row")
        files: Files = {kind: _files(row, kind, messages, rates) for kind in MEDIA_KINDS}
        turns: tuple[Turn, ...]
        media: tuple[MediaRef, ...]
        if (form := form_of(row)) in CAPTIONS and not any(files.values()):
            turns, media = (_plain_text(row[form], form),), ()
        else:
            said, files = place_marks(_conversation(row, messages, keys, files), files)
            said = _with_missing_placeholders(_decided(said, files), files)
            turns, media = tuple(map(_turn_of, said)), tuple(_refs(said, files, messages.attached))
        keys.check_row(row, {ref.kind for ref in media})
        placed = {name for ref in media for name in (ref.path, *ref.frames)}
        held = {os.path.basename(name) for inner in messages.attached.values() for name in inner.names}
        named = tuple(
            (at, name)
            for at, name in names_in(given, ignored_keys)
            if name not in placed and os.path.basename(name) not in held
        )
    except BadSample as error:
        error.sample_id = sample_id
        raise
    except RecursionError as error:
        raise BadSample("row is nested too deeply", sample_id=sample_id) from error
    sample = AnnotatedSample(index, sample_id, turns, media, tuple(sorted(keys.unknown)), tuple(keys.durations), named)
    return ReadRow(sample, messages.attached)


def form_of(row: dict[str, Any]) -> str:
    """The key that says in which way a row is written: one of `CONVERSATION_KEYS`.

    Raises:
        BadSample: it has none.
    """
    for key in CONVERSATION_KEYS:
        needs_answer = key in ASKS and key != "instruction"
        if row.get(key) is not None and not (needs_answer and all(row.get(answer) is None for answer in ANSWERS)):
            return key
    asked = [key for key in ASKS if row.get(key) is not None]
    if asked:
        raise BadSample(f"row has `{asked[0]}` but no answer in any of {', '.join(ANSWERS)}")
    raise BadSample(f"no {', '.join(f'`{key}`' for key in CONVERSATION_KEYS[:-1])} or `{CONVERSATION_KEYS[-1]}`")


def _plain_text(text: object, key: str) -> Turn:
    if key != "text":
        raise BadSample(f"row has `{key}`, but no media that it is about")
    return Turn("text", checked(text, "`text`"))


def _captioned(key: str, text: object, messages: MessageReader, files: Files) -> Iterator[Said]:
    if key == "text" and PLACEHOLDER.search(checked(text, f"`{key}`")):
        raise BadSample(f"`{key}` of a row with media holds placeholders: write the row as a conversation")
    yield messages.turn(0, "user", "".join(f"<{kind}>" for kind in MEDIA_KINDS for _ in files[kind]))
    yield messages.turn(1, "assistant", text)


def _conversation(row: dict[str, Any], messages: MessageReader, keys: KeyReader, files: Files) -> tuple[Said, ...]:
    key = form_of(row)
    if key in CAPTIONS:
        return tuple(_captioned(key, row[key], messages, files))
    said = tuple(_columns(row, messages, keys) if key in ASKS else _listed(key, row[key], messages))
    if not said:
        raise BadSample("conversation has no turns")
    systems = {key: checked(row[key], f"`{key}`") for key in ("system", "system_prompt") if row.get(key)}
    if len(set(systems.values())) > 1:
        raise BadSample("row has both `system` and `system_prompt`, which differ")
    if systems and said[0].role != "system":
        said = (messages.turn(0, "system", next(iter(systems.values()))), *said)
    answers = [turn for turn in said if turn.role == "assistant"]
    if not answers:
        raise BadSample("conversation has no assistant turn")
    if not any(turn.has_loss for turn in answers):
        raise BadSample("every answer is excluded from the loss")
    if key in LISTS and said[-1].role == "user" and (more := [a for a in ANSWERS if row.get(a)]):
        raise BadSample(
            f"row has `{more[0]}` in addition to `{key}` that end with a question: write it as their last turn"
        )
    if next(turn.role for turn in said if turn.role != "system") == "assistant":
        raise BadSample("conversation starts with an assistant turn")
    return said


def _listed(key: str, raw: object, messages: MessageReader) -> Iterator[Said]:
    if isinstance(raw, str) and raw.lstrip().startswith(("[", "{")):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadSample(f"`{key}` is a string that is not JSON: {error}") from error
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
        yield from messages.read(number, entry)


def _columns(row: dict[str, Any], messages: MessageReader, keys: KeyReader) -> Iterator[Said]:
    """A question and its answer, each a string or a list of messages, and the pairs before them."""
    keys.check_columns(row, BESIDE_QUESTIONS)
    asked, answered = (_only_one(row, names) for names in (ASKS, ANSWERS))
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadSample("`history` is not a list of pairs")
    question, more = row[asked], row.get("input") or ""
    for number, pair in enumerate(history):
        yield messages.turn(2 * number, "user", pair[0])
        yield messages.turn(2 * number + 1, "assistant", pair[1])
    number = 2 * len(history)
    if _is_messages(question):
        if more:
            raise BadSample(f"row has `input` together with a `{asked}` of messages")
        yield from (replace(turn, has_loss=turn.role != "assistant") for turn in _listed(asked, question, messages))
    else:
        texts = [checked(question, f"`{asked}`"), checked(more, "`input`")]
        yield messages.turn(number, "user", "\n".join(filter(None, texts)))
    answer = row.get(answered)
    if _is_messages(answer):
        yield from _listed(answered, answer, messages)
    else:
        yield messages.turn(number + 1, "assistant", answer)


def _only_one(row: dict[str, Any], names: tuple[str, ...]) -> str:
    given = [name for name in names if row.get(name) is not None]
    if len(given) > 1:
        raise BadSample(f"row has both `{given[0]}` and `{given[1]}`: only one of {', '.join(names)} is allowed")
    return given[0] if given else names[0]


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(v, dict) and v.keys() & {"role", "from"} for v in value)


def _decided(said: tuple[Said, ...], files: Files) -> tuple[Said, ...]:
    """The turns with those marks only that stand for media."""
    wanted = Counter(m.kind for turn in said for m in turn.marks if turn.role == "user" and m.is_sure and not m.path)
    maybe = Counter(m.kind for turn in said for m in turn.marks if turn.role == "user" and not m.is_sure)
    left = {kind: len(files[kind]) - wanted[kind] for kind in MEDIA_KINDS}
    for kind, count in left.items():
        if count < 0:
            reason = f"{wanted[kind]} <{kind}> placeholders for {len(files[kind])} {kind} files"
            raise BadSample(f"{reason}; put literal text into a text part of a list of parts")
        if 0 < count < maybe[kind]:
            raise BadSample(f"{count} {kind} files remain for {maybe[kind]} <{kind}> in text parts")
    for number, turn in enumerate(said):
        if turn.role != "user" and (lost := [m for m in turn.marks if left[m.kind] > maybe[m.kind]]):
            raise BadSample(
                f"turn {number} ({turn.role}) holds <{lost[0].kind}>; media belong to user turns, and the row has a "
                "file that no user turn holds"
            )
    return tuple(
        replace(t, marks=tuple(m for m in t.marks if t.role == "user" and (m.is_sure or left[m.kind] > 0)))
        for t in said
    )


def _with_missing_placeholders(said: tuple[Said, ...], files: Files) -> tuple[Said, ...]:
    found = Counter(mark.kind for turn in said for mark in turn.marks if not mark.path)
    front = [(kind, f"<{kind}>\n") for kind in MEDIA_KINDS for _ in files[kind][found[kind] :]]
    first = next(i for i, turn in enumerate(said) if turn.role == "user")
    text, marks = "", []
    for kind, placeholder in front:
        marks.append(Mark(len(text), kind, None, True))
        text += placeholder
    turn = said[first]
    moved = tuple(mark._replace(start=mark.start + len(text)) for mark in turn.marks)
    cuts = tuple(cut + len(text) for cut in turn.cuts)
    turn = replace(turn, text=text + turn.text, marks=(*marks, *moved), cuts=cuts)
    return (*said[:first], turn, *said[first + 1 :])


def _turn_of(said: Said) -> Turn:
    starts = {mark.start for mark in said.marks}
    found = (match.start() for match in PLACEHOLDER.finditer(said.text) if said.role == "user")
    literal = tuple(start for start in found if start not in starts)
    return Turn(said.role, said.text, literal, said.has_loss, said.cuts)


def _refs(said: tuple[Said, ...], files: Files, attached: Mapping[str, Attached | FrameList]) -> Iterator[MediaRef]:
    queues = {kind: iter(paths) for kind, paths in files.items()}
    for turn in said:
        for mark in turn.marks:
            path = next(queues[mark.kind]) if mark.path is None else mark.path
            frames = attached.get(path)
            yield MediaRef(mark.kind, path, frames.paths if isinstance(frames, FrameList) else ())


def _files(row: dict[str, Any], kind: str, messages: MessageReader, rates: tuple[float, ...]) -> tuple[str, ...]:
    given = {}
    for key in (kind, f"{kind}s"):
        value = row.get(key)
        entries = entries_of(value, kind)
        of_entry = rates if kind == "video" and rates else [None] * len(entries)
        names = [messages.name(entry, kind, f"`{key}`", fps) for entry, fps in zip(entries, of_entry, strict=False)]
        if None in names and any(names):
            raise BadSample(
                f"`{key}` names no file in place {names.index(None)}: {shortened(entries[names.index(None)])}"
            )
        if found := tuple(name for name in names if name is not None):
            given[key] = found
    one, several = (row.get(key) for key in (kind, f"{kind}s"))
    if len(given) > 1 and several not in (one, [one]):
        raise BadSample(f"row has both `{kind}` and `{kind}s`, which differ")
    return next(iter(given.values()), ())
