"""The tokenizer and chat template that ship with a model, tried on the family's tokens and on a conversation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflop.data.annotations import AnnotatedSample, BadSample, Turn
from dflop.data.formats.row_source import RowSource
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError
from dflop.models.media import MediaRules

NUM_LOOKED_AT = 64
"""Rows of a file that are read to judge it."""
_TEMPLATES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")
"""In the order in which processors of transformers look."""
DEFAULT_TEMPLATE = "chatml"


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """What was found, and what is wrong with it."""

    path: Path | None
    template: str
    """Name or file."""
    has_template: bool = False
    """Whether a file states the template; else it is assumed."""
    problem: str = ""
    """Why training could not use it; empty: it can."""
    notes: tuple[str, ...] = ()


def find_tokenizer(folders: tuple[Path, ...], rules: MediaRules) -> FoundTokenizer:
    """The first `tokenizer.json` of some folders, with a chat template that it works with.

    Args:
        folders: Searched in order.
        rules: Of the family, whose special tokens it has to know.
    """
    path = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    if path is None:
        return FoundTokenizer(
            None, DEFAULT_TEMPLATE, problem="no tokenizer.json next to the model's config or the data"
        )
    notes: list[str] = []
    places = dict.fromkeys((path.parent, *folders))
    stated = [str(file) for folder in places for name in _TEMPLATES if (file := folder / name).is_file()]
    for template in (*stated, DEFAULT_TEMPLATE):
        is_default = template == DEFAULT_TEMPLATE
        try:
            _try(path, rules, template)
        except ConfigError as error:
            if is_default:
                assumed = f"{error.what} ({error.hint}); no file states a chat template, so `{template}` is assumed"
                return FoundTokenizer(path, template, False, "; ".join(notes) or assumed)
            if "no `chat_template`" not in error.what:
                notes.append(f"the chat template in {template} is not used: {error.what}")
        else:
            break
    return FoundTokenizer(path, template, not is_default, notes=tuple(notes))


def tokens_in_texts(found: FoundTokenizer, rules: MediaRules, source: RowSource) -> Mapping[str, int]:
    """Special tokens that texts may name and that some do: of so many of the rows looked at."""
    if found.path is None or found.problem:
        return {}
    tokenizer = ChatTokenizer(found.path, rules, found.template)
    named: Counter[str] = Counter()
    for index in source.spread(NUM_LOOKED_AT):
        with contextlib.suppress(BadSample):
            named.update(tokenizer.spelled_out(source.sample(index)) & tokenizer.nameable)
    return named


def _try(path: Path, rules: MediaRules, template: str) -> None:
    turns = (Turn("user", "What is this?"), Turn("assistant", "A cat."))
    next(ChatTokenizer(path, rules, template).encode([AnnotatedSample(0, "", turns, ())], [[]]))
