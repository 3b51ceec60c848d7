r"""Text to token ids: the ChatML template, where media rows go, and which tokens carry loss.

    <|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n

The answer and its `<|im_end|>` are supervised. A placeholder becomes `begin`, one `pad` per row the encoder hands to
the LLM, `end`. Control tokens are inserted as ids and text is encoded with special tokens switched off, so a user
who types `<|im_end|>` gets the characters and never the token. Lengths need no media: the profiler's `count` and the
trainer's `encode` walk the same pieces, so num_text_tokens + sum(num_rows) is the length of what is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dflop.data.annotations import PLACEHOLDER, AnnotatedSample, Turn
from dflop.errors import ConfigError
from dflop.models.family import Family

IGNORE_LABEL = -100
"""Label of a token that carries no loss, as PyTorch's cross entropy has it."""

TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Token ids of one sample and the labels at the same positions (not shifted)."""

    input_ids: npt.NDArray[np.int64]
    """Shape (num_llm_tokens,)."""
    labels: npt.NDArray[np.int64]
    """Shape (num_llm_tokens,): the id where it is supervised, `IGNORE_LABEL` elsewhere and always at position 0."""
    media_spans: tuple[tuple[int, int], ...]
    """Per media item, in order: [start, stop) of its pad tokens, which the encoder's rows replace."""


@dataclass(frozen=True, slots=True)
class _Text:
    ids: list[int]
    supervised: bool


@dataclass(frozen=True, slots=True)
class _MediaRows:
    pad: int


class ChatTokenizer:
    """A `tokenizer.json` bound to the special tokens of a model family.

    Args:
        path: A file `tokenizers.Tokenizer` can load.
        family: Whose `media_tokens` mark media.

    Raises:
        ConfigError: the file does not load, lacks a special token, or does not mark one as special.
    """

    def __init__(self, path: Path, family: Family) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"tokenizer cannot be loaded: {error}", where=str(path)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._media_tokens = dict(family.media_tokens)
        media = [t for m in self._media_tokens.values() for t in (m.begin, m.pad, m.end) if t]
        self._special = self._special_ids([TURN_BEGIN, TURN_END, *media], path, family)
        self._newline = self._ids("\n")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids of the template's and the family's special tokens, by token."""
        return dict(self._special)

    def count(self, sample: AnnotatedSample) -> tuple[int, int]:
        """(num_text_tokens, num_supervised_tokens): every token but the media rows, and those that carry loss.

        Raises:
            KeyError: the family takes no media of some kind in the sample.
        """
        pieces = [p for p in self._pieces(sample) if isinstance(p, _Text)]
        return sum(len(p.ids) for p in pieces), sum(len(p.ids) for p in pieces if p.supervised)

    def encode(self, sample: AnnotatedSample, num_rows_per_item: Sequence[int]) -> EncodedSample:
        """Token ids, labels and media positions of a sample whose media items have these many rows.

        Raises:
            KeyError: the family takes no media of some kind in the sample.
            ValueError: `num_rows_per_item` has not one entry per media item.
        """
        if len(num_rows_per_item) != len(sample.media):
            raise ValueError(f"{len(num_rows_per_item)} row counts for {len(sample.media)} media items")
        rows = iter(num_rows_per_item)
        input_ids: list[int] = []
        labels: list[int] = []
        spans: list[tuple[int, int]] = []
        for piece in self._pieces(sample):
            if isinstance(piece, _MediaRows):
                ids, supervised = [piece.pad] * next(rows), False
                spans.append((len(input_ids), len(input_ids) + len(ids)))
            else:
                ids, supervised = piece.ids, piece.supervised
            input_ids += ids
            labels += ids if supervised else [IGNORE_LABEL] * len(ids)
        return EncodedSample(np.array(input_ids, np.int64), np.array(labels, np.int64), tuple(spans))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids with special tokens shown; for people and reports."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _pieces(self, sample: AnnotatedSample) -> Iterator[_Text | _MediaRows]:
        for turn in sample.turns:
            yield _Text([self._special[TURN_BEGIN]], False)
            if turn.role == "assistant":
                # An empty answer would teach nothing but to stop, so it carries no loss at all.
                supervised = bool(turn.text.strip())
                yield _Text(self._ids("assistant\n"), False)
                yield _Text([*self._ids(turn.text), self._special[TURN_END]], supervised)
            else:
                yield from self._prompt(turn)
                yield _Text([self._special[TURN_END]], False)
            yield _Text(self._newline, False)

    def _prompt(self, turn: Turn) -> Iterator[_Text | _MediaRows]:
        # re.split with one group alternates text, kind, text, kind, ..., text
        for number, part in enumerate(PLACEHOLDER.split(f"{turn.role}\n{turn.text}")):
            if number % 2 == 0:
                yield _Text(self._ids(part), False)
                continue
            marks = self._media_tokens[part]
            yield _Text([self._special[marks.begin]] if marks.begin else [], False)
            yield _MediaRows(self._special[marks.pad])
            yield _Text([self._special[marks.end]] if marks.end else [], False)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _special_ids(self, names: list[str], path: Path, family: Family) -> dict[str, int]:
        found = {name: self._tokenizer.token_to_id(name) for name in names}
        missing = sorted(name for name, token_id in found.items() if token_id is None)
        if missing:
            raise ConfigError(
                f"tokenizer lacks special tokens of family {family.name}: {', '.join(missing)}",
                where=str(path),
                hint="use the tokenizer that belongs to the model, or add the tokens to it as special tokens",
            )
        ids = {name: token_id for name, token_id in found.items() if token_id is not None}
        forgeable = sorted(name for name, token_id in ids.items() if token_id in self._ids(name))
        if forgeable:
            raise ConfigError(
                f"tokens are not marked special, so any user text could forge them: {', '.join(forgeable)}",
                where=str(path),
                hint='set "special": true for them under "added_tokens"',
            )
        return ids
