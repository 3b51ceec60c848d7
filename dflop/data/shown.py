"""Turns as a chat template shows them, with what the template must not take for its own kept away from it.

A template that looks into its texts is given them. Media and special tokens that a text names stand in them as marks
then, so that what looks like the end of a turn is not one, and are put back into what the template made of the text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from dflop.data.annotations import PLACEHOLDER, BadSample, Turn
from dflop.data.chat import ChatTemplate, Skeleton

_MAX_SHOWN = 512
"""Conversations remembered: a sample is checked, and counted soon after."""
# Characters of a private-use area, others than those of `chat.py`.
_KEPT = "\ue0f2{}\ue0f3"
_KEPTS = re.compile("\ue0f2(\\d+)\ue0f3")
_PRIVATE = "[\ue0f0-\ue0f3]"

Pieces = list[str]
"""A turn as `Turn.pieces` cuts it: text, kind of media, text, ..., text."""


class ShownTurns:
    """Conversations as a template shows them.

    Args:
        template: Whose.
        special: Matches special tokens of the tokenizer.
    """

    def __init__(self, template: ChatTemplate, special: re.Pattern[str]) -> None:
        self._template = template
        self._kept_away = re.compile(f"{special.pattern}|{_PRIVATE}")
        self._show: Callable[[tuple[Turn, ...]], tuple[Skeleton, tuple[Pieces, ...]]] = functools.lru_cache(_MAX_SHOWN)(
            self._shown
        )

    def __call__(self, turns: tuple[Turn, ...]) -> tuple[Skeleton, tuple[Pieces, ...]]:
        """What the template writes around the turns, and every turn as it shows it.

        Raises:
            ConfigError: it refuses such turns, whatever their texts.
            BadSample: it refuses these texts, or its own text cannot be told from theirs.
        """
        return self._show(turns)

    def _shown(self, turns: tuple[Turn, ...]) -> tuple[Skeleton, tuple[Pieces, ...]]:
        roles, pieces = tuple(turn.role for turn in turns), [turn.pieces() for turn in turns]
        if not self._template.looks_into(roles, tuple(turn.text for turn in turns)):
            return self._template.skeleton(roles), tuple(pieces)
        kept: list[str] = []
        texts = tuple("".join(self._marked(of_turn, kept)) for of_turn in pieces)
        found = self._template.shown(roles, texts)
        return found.skeleton, tuple(map(functools.partial(_restored, kept), found.texts, pieces))

    def _marked(self, pieces: Pieces, kept: list[str]) -> Pieces:
        return [
            _keep(kept, f"<{piece}>") if number % 2 else self._kept_away.sub(lambda match: _keep(kept, match[0]), piece)
            for number, piece in enumerate(pieces)
        ]


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
        raise BadSample("the chat template loses or moves media")
    return found
