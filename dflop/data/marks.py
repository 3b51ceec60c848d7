"""Marks of other models in the texts of a row with media: `<image_1>`, `<|image|>`, `[IMG]`, `<img>a.jpg</img>`, ...

They are known by their shape, not by a list: a name in brackets with one word for a kind of media in it. Two that open
and close around nothing, around others or around a path are one. Such a mark becomes the placeholder of the kind where
there are as many as files without a place, numbered in order; otherwise its row is refused. It stays text in rows
without media, between backticks, where an element of its name is closed later, where attributes stand with the name, as
in HTML, and within sentences of rows whose files all have a place. But `<image_1>` in a user's text is always refused
there, as `<image>` is, and so is one `<img>` or `{image}` within a sentence of a row with a file: it may be either.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dflop.data.annotations import MEDIA_KINDS, PLACEHOLDER, BadSample
from dflop.data.media_value import EXTENSIONS
from dflop.data.message import Mark, Said

Files = Mapping[str, tuple[str, ...]]

_KINDS = {
    **dict.fromkeys(("image", "img", "picture", "pic", "photo"), "image"),
    **dict.fromkeys(("video", "vid", "movie"), "video"),
    **dict.fromkeys(("audio", "sound", "speech", "voice", "wav"), "audio"),
    **dict.fromkeys(("vision", "media", "visual", "multimodal"), ""),
}
_TAG = re.compile(
    r"</?\|?(?P<a>[A-Za-z][\w.:#-]{0,40}?(?: \d+)?)\|?>"
    r"|\[(?P<b>[A-Za-z]\w{0,30}(?: \d+)?)\]|\{\{?\s*(?P<c>[A-Za-z]\w{0,30}(?: \d+)?)\s*\}?\}"
)
_WORD = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|\d+")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_PATH = re.compile(rf"\s*(\S[^\n]{{0,500}}\.(?:{'|'.join(itertools.chain(*EXTENSIONS.values()))}))\s*", re.IGNORECASE)
_NOTHING = re.compile(r"[\s./]*")
_BEGINS, _ENDS = {"start", "begin", "bos"}, {"end", "eos"}
_MOST_INSIDE = 2000


class _Tag(NamedTuple):
    """A name in brackets that holds a word for media, or a pair of them."""

    start: int
    end: int
    text: str
    name: str
    kind: str
    """Empty of `<|vision_start|>` and such."""
    number: int | None
    words: frozenset[str]
    """Marks besides the one for media."""
    path: str = ""
    is_sure: bool = False
    """Whether it has the shape of nothing else."""

    @property
    def is_plain(self) -> bool:
        return PLACEHOLDER.fullmatch(self.text) is not None

    @property
    def is_close(self) -> bool:
        return self.text.startswith("</") or bool(self.words & _ENDS)


def place_marks(said: tuple[Said, ...], files: Files) -> tuple[tuple[Said, ...], Files]:
    """Turns with placeholders for the marks of other models, and the files of the row that no mark names.

    Args:
        said: The turns.
        files: Of the row by kind, in order.

    Raises:
        BadSample: a mark that stands for no file for certain.
    """
    tags = [(number, tag) for number, turn in enumerate(said) for tag in _tags(turn.text)]
    marks = [mark for turn in said if turn.role == "user" for mark in turn.marks if not mark.path]
    if not tags and all(files[mark.kind] for mark in marks):
        return said, files
    plain = Counter(mark.kind for mark in marks)
    has_media = any(files.values()) or any(mark.path for turn in said for mark in turn.marks)
    of_users = [(number, tag) for number, tag in tags if said[number].role == "user"]
    for number, tag in tags if has_media else ():
        if said[number].role != "user" and tag.is_sure and tag.number is not None:
            raise BadSample(f"turn {number} ({said[number].role}) holds {tag.text}, a mark of another model")
    left = {kind: list(names) for kind, names in files.items()}
    for at, (number, tag) in enumerate(of_users):
        inside = _inside(said[number].marks, tag)
        plain.subtract(mark.kind for mark in inside if not mark.path)
        for mark in (mark for mark in inside if mark.path):  # a part that names its file
            of_users[at] = (number, tag._replace(kind=mark.kind, path=mark.path or ""))
        if tag.path in left.get(tag.kind, ()):
            left[tag.kind].remove(tag.path)
    placed = [(number, tag, tag.kind) for number, tag in of_users if tag.path]
    free = {kind: len(left[kind]) - plain[kind] for kind in MEDIA_KINDS}
    unnamed = [found for found in of_users if not found[1].path and (has_media or found[1].number is not None)]
    others = {kind: other for kind in MEDIA_KINDS if not files[kind] and (other := _other(kind, plain[kind], free))}
    for kind, of_kind in itertools.groupby(
        sorted(unnamed, key=lambda found: found[1].kind), lambda found: found[1].kind
    ):
        group = list(of_kind)
        meant = kind if free.get(kind, 0) > 0 else _other(kind, len(group), free) or kind
        if _stand_for(said, group, meant, free.get(meant, 0)):
            placed += [(number, tag, meant) for number, tag in group]
    turns = [
        _replaced(
            turn, [(tag, kind) for at, tag, kind in placed if at == number], others if turn.role == "user" else {}
        )
        for number, turn in enumerate(said)
    ]
    return tuple(turns), {kind: tuple(names) for kind, names in left.items()}


def _other(kind: str, count: int, free: Mapping[str, int]) -> str:
    """The one other kind of which as many files have no place: LLaVA has one mark for pictures and videos."""
    kinds = [other for other in MEDIA_KINDS if other != kind and free[other] > 0]
    return kinds[0] if len(kinds) == 1 and free[kinds[0]] == count else ""


def _stand_for(said: Sequence[Said], group: Sequence[tuple[int, _Tag]], kind: str, num_free: int) -> bool:
    """Whether marks stand for files; False: they are text.

    Raises:
        BadSample: the text is ambiguous.
    """
    sure = [found for found in group if found[1].is_sure]
    if num_free <= 0:
        sure = [found for found in group if found[1].is_sure or _is_alone(said[found[0]].text, found[1])]
        if not sure:
            return False
    numbers = [tag.number for _, tag in group]
    in_order = set(numbers) == {None} or numbers in (list(range(len(group))), list(range(1, len(group) + 1)))
    number, tag = (sure or group)[0]
    is_a_name = tag.text[0] == "<" and bool(tag.words)
    may_be_text = len(group) == 1 and not (sure or is_a_name or _is_alone(said[number].text, tag))
    if len(group) == num_free and in_order and not may_be_text:
        return True
    order = "" if in_order else ", in order of the files"
    raise BadSample(
        f"turn {number} holds {tag.text}, a mark of another model: {len(group)} such for {max(0, num_free)} "
        f"{kind or 'media'} files without a place; write <{kind or 'image'}>{order}"
    )


def _is_alone(text: str, tag: _Tag) -> bool:
    """Whether a mark has a line of its own, or begins or ends the text."""
    before, after = text[: tag.start], text[tag.end :]
    line = before.rpartition("\n")[2] + after.partition("\n")[0]
    return not (before.strip() and after.strip() and line.strip())


def _inside(marks: Sequence[Mark], tag: _Tag) -> Sequence[Mark]:
    first, end = (bisect.bisect_left(marks, at, key=lambda mark: mark.start) for at in (tag.start, tag.end))
    return marks[first:end]


def _replaced(turn: Said, tags: Sequence[tuple[_Tag, str]], others: Mapping[str, str]) -> Said:
    """A turn with placeholders in place of marks, and of another kind in place of plain ones."""
    gone = {mark for tag, _ in tags for mark in _inside(turn.marks, tag)}
    stops = [(tag.start, tag.end, Mark(0, kind, tag.path or None, True)) for tag, kind in tags]
    for mark in (mark for mark in turn.marks if mark not in gone):
        kind = mark.kind if mark.path else others.get(mark.kind, mark.kind)
        stops.append((mark.start, mark.start + len(f"<{mark.kind}>"), mark._replace(kind=kind)))
    pieces, at, length = [], 0, 0
    marks: list[Mark] = []
    longer = [(-1, 0)]
    for start, end, mark in sorted(stops):
        marks.append(mark._replace(start=length + start - at))
        pieces += [turn.text[at:start], f"<{mark.kind}>"]
        length, at = marks[-1].start + len(pieces[-1]), end
        longer.append((end, length - end))
    cuts = (cut + longer[bisect.bisect_right(longer, (cut, len(turn.text) * 9)) - 1][1] for cut in turn.cuts)
    return replace(turn, text="".join([*pieces, turn.text[at:]]), marks=tuple(marks), cuts=tuple(cuts))


def _tags(text: str) -> list[_Tag]:
    """Marks in a text, without plain placeholders on their own."""
    if "<" not in text and "[" not in text and "{" not in text:
        return []
    raw, found, at = list(_raw(text)), [], 0
    ends = _ends(raw)
    while at < len(raw):
        tag = raw[at]
        last = ends.get(at, at)
        is_like = last > at and (last == at + 1 or raw[at + 1].text == raw[last - 1].text)
        if is_like and last - at <= _MOST_INSIDE and (pair := _pair(text, raw[at : last + 1])) is not None:
            found.append(pair)
            at = last
        elif not tag.is_close and not tag.is_plain and (last == at or tag.text.startswith("<|")):
            found.append(tag)
        at += 1
    return found


def _ends(raw: Sequence[_Tag]) -> dict[int, int]:
    """Which tag closes which, by their numbers."""
    waiting: dict[object, list[int]] = {}
    ends: dict[int, int] = {}
    for number, tag in enumerate(raw):
        if not tag.is_close:
            waiting.setdefault(tag.name, []).append(number)
            if tag.words & _BEGINS:
                waiting.setdefault(tag.words - _BEGINS, []).append(number)
        elif opened := waiting.get(tag.name if tag.text.startswith("</") else tag.words - _ENDS):
            ends[opened.pop()] = number
    return ends


def _raw(text: str) -> Iterator[_Tag]:
    code = [match.span() for match in _CODE.finditer(text)] if "`" in text else []
    begins = [start for start, _ in code]
    for match in _TAG.finditer(text):
        name = next(filter(None, match.groups()))
        words = [word.lower() for word in _WORD.findall(name)]
        kinds = {_KINDS[word] for word in words if word in _KINDS}
        numbers = [int(word) for word in words if word.isdigit()]
        specific = kinds - {""} or kinds
        before = bisect.bisect_right(begins, match.start())
        is_code = before > 0 and match.start() < code[before - 1][1]
        if len(specific) != 1 or len(numbers) > 1 or is_code:
            continue
        other = frozenset(word for word in words if word not in _KINDS and not word.isdigit())
        has_pipes = match[0].startswith("<|")
        is_sure = has_pipes or (match[0][0] == "<" and bool(numbers) and not other)
        number = numbers[0] if numbers else None
        yield _Tag(match.start(), match.end(), match[0], name, min(specific), number, other, "", is_sure)


def _pair(text: str, tags: Sequence[_Tag]) -> _Tag | None:
    """What opens with the first and closes with the last as one mark; None if it holds something else."""
    first, last, inside = tags[0], tags[-1], tags[1:-1]
    start, end = first.start, last.end
    between = "".join(text[tag.end : after.start] for tag, after in itertools.pairwise(tags))
    if not inside and (path := _PATH.fullmatch(between)) is not None:
        kind = first.kind or next(kind for kind, of_kind in EXTENSIONS.items() if path[1].lower().endswith(of_kind))
        return first._replace(end=end, text=text[start:end], kind=kind, path=path[1], is_sure=True)
    if not _NOTHING.fullmatch(between) or len({tag.text for tag in inside}) > 1 or sum(t.is_plain for t in inside) > 1:
        return None
    core = inside[0] if inside else first
    if between and text[start - 1 : start] == "(" and text[end : end + 1] == ")":  # MiniCPM: (<image>./</image>)
        start, end = start - 1, end + 1
    number = core.number if core.number is not None else first.number
    is_sure = first.is_sure or bool(inside) or bool(between.strip())
    return _Tag(start, end, text[start:end], first.name, core.kind or first.kind, number, first.words, "", is_sure)
