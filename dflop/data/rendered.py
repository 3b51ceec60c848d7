"""Conversations as a chat template shows them, from left to right: its own text, texts of turns, media.

Where a template writes media itself (`Audio 1: <|audio_bos|><|AUDIO|>...`, pictures in front of the question), they
stand where it puts them, and its n-th placeholder of a kind is the n-th item of it, as in Hugging Face's processors.
One that knows no media is given what stands for them as text.

A template that looks into its texts is given them. Special tokens that a text names stand in them as marks then, so
that what looks like the end of a turn is not one, and are put back into what the template made of the text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dflop.data.annotations import PLACEHOLDER, BadSample, Turn
from dflop.data.chat import ChatTemplate, Parts, Skeleton
from dflop.errors import ConfigError

_MAX_SHOWN = 512
"""Conversations remembered: a sample is checked, and counted soon after."""
# Characters of a private-use area, others than those of `chat.py`.
_KEPT = "\ue0f2{}\ue0f3"
_KEPTS = re.compile("\ue0f2(\\d+)\ue0f3")
_PRIVATE = "[\ue0f0-\ue0f3]"

Pieces = list[str]
"""Text as `Turn.pieces` cuts it: text, kind of media, text, ..., text."""


class TurnText(NamedTuple):
    """Text of a turn, or some of it."""

    turn: int
    text: str


class Item(NamedTuple):
    """A media item."""

    number: int
    in_template: bool
    """Whether it takes the place of the template's own placeholder."""


Segment = str | TurnText | Item


class RenderedTurns:
    """Conversations as a template shows them.

    Args:
        template: Whose.
        special: Matches special tokens of the tokenizer.
        placeholders: What a template writes for an item, per kind of media.
    """

    def __init__(self, template: ChatTemplate, special: re.Pattern[str], placeholders: Mapping[str, str]) -> None:
        self._template, self._placeholders = template, dict(placeholders)
        self._kept_away = re.compile(f"{special.pattern}|{_PRIVATE}")
        self._kinds = {placeholder: kind for kind, placeholder in placeholders.items()}
        names = sorted(self._kinds, key=len, reverse=True)
        self._written = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"((?!))")
        self._show: Callable[[tuple[Turn, ...]], tuple[Segment, ...]] = functools.lru_cache(_MAX_SHOWN)(self._shown)

    def __call__(self, turns: tuple[Turn, ...]) -> tuple[Segment, ...]:
        """What the template writes and what the turns say, from left to right.

        Raises:
            ConfigError: it refuses such turns, whatever their texts, or loses or repeats their media.
            BadSample: it refuses these texts, or its own text cannot be distinguished from theirs.
        """
        return self._show(turns)

    def _shown(self, turns: tuple[Turn, ...]) -> tuple[Segment, ...]:
        roles, pieces = tuple(turn.role for turn in turns), [turn.pieces() for turn in turns]
        parts: Parts = tuple(map(_parts, pieces)) if any(len(of_turn) > 1 for of_turn in pieces) else ()
        if parts and self._writes_media(roles, parts):
            of_texts = [(number, [text]) for number, of_turn in enumerate(pieces) for text in _texts(of_turn)]
        else:
            parts, of_texts = (), list(enumerate(pieces))
        if any(turn.cuts for turn in turns):
            self._check_cuts(roles, turns, tuple("".join(text) for _, text in of_texts), parts)
        skeleton, shown = self._filled(roles, parts, [of_text for _, of_text in of_texts])
        numbers = _numbers(pieces)
        return tuple(self._segments(skeleton, [turn for turn, _ in of_texts], shown, numbers, bool(parts)))

    def _filled(self, roles: tuple[str, ...], parts: Parts, given: list[Pieces]) -> tuple[Skeleton, list[Pieces]]:
        """What the template writes around the texts, and every text as it shows it."""
        raw = tuple("".join(f"<{p}>" if number % 2 else p for number, p in enumerate(of_text)) for of_text in given)
        if not self._template.looks_into(roles, raw, parts):
            return self._template.skeleton(roles, parts), given
        kept: list[str] = []
        texts = tuple("".join(self._marked(of_text, kept)) for of_text in given)
        found = self._template.shown(roles, texts, parts)
        return found.skeleton, list(map(functools.partial(_restored, kept), found.texts, given))

    def _segments(
        self, skeleton: Skeleton, turns: list[int], shown: list[Pieces], numbers: dict[str, Iterator[int]], writes: bool
    ) -> Iterator[Segment]:
        for part in skeleton:
            if isinstance(part, str):
                for number, text in enumerate(self._written.split(part) if writes else [part]):
                    yield Item(next(numbers[self._kinds[text]]), True) if number % 2 else text
                continue
            for number, text in enumerate(shown[part]):
                yield Item(next(numbers[text]), False) if number % 2 else TurnText(turns[part], text)

    def _writes_media(self, roles: tuple[str, ...], parts: Parts) -> bool:
        """Whether the template writes every item of such turns itself; it may know nothing of media instead.

        Raises:
            ConfigError: it knows them and does not write each once.
        """
        wanted = Counter(kind for of_turn in parts for kind in of_turn if kind != "text")
        known = [self._placeholders[kind] for kind in wanted if kind in self._placeholders]
        if len(known) < len(wanted):
            return False  # which its family refuses
        is_known = any(placeholder in self._template.source for placeholder in known)
        try:
            skeleton = self._template.skeleton(roles, parts)
        except ConfigError:
            if is_known:
                raise
            return False
        own = "".join(part for part in skeleton if isinstance(part, str))
        found = Counter(self._kinds[placeholder] for placeholder in self._written.findall(own))
        if found != wanted and (found or is_known):
            shown, asked = (
                ", ".join(f"{counts[kind]} {self._placeholders[kind]}" for kind in sorted({*wanted, *found}))
                for counts in (found, wanted)
            )
            raise ConfigError(f"the chat template writes {shown} for {asked}", where="dataset.chat_template")
        return found == wanted

    def _check_cuts(
        self, roles: tuple[str, ...], turns: tuple[Turn, ...], texts: tuple[str, ...], parts: Parts
    ) -> None:
        """Refuse several text parts in a row that the template does not show as the one text they are here."""
        cut = [_cut(turn) for turn in turns]
        cut_texts = tuple(text for of_turn in cut for kind, text in of_turn if kind == "text")
        cut_parts = tuple(tuple(kind for kind, _ in of_turn) for of_turn in cut)
        if len(cut_texts) > len(texts) and not self._template.shows_alike(
            roles, (texts, parts), (cut_texts, cut_parts)
        ):
            raise BadSample("the chat template does not join consecutive text parts: join them in the data")

    def _marked(self, pieces: Pieces, kept: list[str]) -> Pieces:
        return [
            _keep(kept, f"<{piece}>") if number % 2 else self._kept_away.sub(lambda match: _keep(kept, match[0]), piece)
            for number, piece in enumerate(pieces)
        ]


def _parts(pieces: Pieces) -> tuple[str, ...]:
    """Kinds of the parts that a template is given for a turn."""
    kinds = (piece if number % 2 else "text" for number, piece in enumerate(pieces) if number % 2 or piece)
    return tuple(kinds) or ("text",)


def _texts(pieces: Pieces) -> list[str]:
    """Texts of the parts that a template is given for a turn."""
    return [text for text in pieces[::2] if text] or ([""] if len(pieces) == 1 else [])


def _cut(turn: Turn) -> list[tuple[str, str]]:
    """Kinds and texts of a turn's parts, text parts in a row kept apart."""
    found, at = [], 0
    for number, piece in enumerate(turn.pieces()):
        if number % 2:
            found.append((piece, ""))
            at += len(f"<{piece}>")
            continue
        edges = [0, *(cut - at for cut in turn.cuts if 0 < cut - at < len(piece)), len(piece)]
        found += [("text", piece[start:stop]) for start, stop in itertools.pairwise(edges) if start < stop]
        at += len(piece)
    return found or [("text", "")]


def _numbers(pieces: list[Pieces]) -> dict[str, Iterator[int]]:
    """Numbers of a conversation's media items, by kind."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, kind in enumerate(kind for of_turn in pieces for kind in of_turn[1::2]):
        found[kind].append(number)
    return {kind: iter(of_kind) for kind, of_kind in found.items()}


def _keep(kept: list[str], text: str) -> str:
    kept.append(text)
    return _KEPT.format(len(kept) - 1)


def _restored(kept: list[str], shown: str, pieces: Pieces) -> Pieces:
    found = [""]
    for number, part in enumerate(_KEPTS.split(shown)):
        text = kept[int(part)] if number % 2 else part
        if number % 2 and len(pieces) > 1 and (media := PLACEHOLDER.fullmatch(text)):
            found += [media[1], ""]
        else:
            found[-1] += text
    if found[1::2] != pieces[1::2]:
        raise BadSample("the chat template drops or moves media")
    return found
