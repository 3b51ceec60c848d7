r"""Text to token ids: the chat template around the turns, where media rows go, and which tokens carry loss.

Template, turns and what a family writes around media are laid end to end and split only at special tokens, so a
tokenizer sees the text it sees in Hugging Face's processors: `user\n` and the question after it are one string. An
answer and the special token that directly follows it are supervised; of pre-training text, everything is. Special
tokens are inserted as ids and text is encoded with them switched off: a user who types `<|im_end|>` gets the characters
and never the token. Data with boxes and the like name special tokens in their texts on purpose: those of a list are
inserted there, too, and `spelled_out` tells what other texts name. Media are not needed, only their layouts: the
profiler measures what the trainer will encode.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from dflop.data.annotations import PLACEHOLDER, AnnotatedSample, BadSample, MediaRef, Turn
from dflop.data.chat import PLAIN_ROLE, ChatTemplate
from dflop.data.rendered import Item, RenderedTurns, TurnText
from dflop.data.special_tokens import ids_in_texts, load_tokenizer, one_of, special_ids
from dflop.errors import ConfigError
from dflop.models.media import Layout, MediaRules

IGNORE_LABEL = -100
"""Label of a token that carries no loss, as PyTorch's cross entropy has it."""


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Token ids of one sample and the labels at the same positions (not shifted)."""

    input_ids: npt.NDArray[np.int64]
    """Shape (num_llm_tokens,)."""
    labels: npt.NDArray[np.int64]
    """Shape (num_llm_tokens,): the id where it is supervised, `IGNORE_LABEL` elsewhere and always at position 0."""
    media_positions: tuple[npt.NDArray[np.int64], ...]
    """Per media item, in order: positions of its pad tokens, which the encoder's rows replace."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised_tokens(self) -> int:
        return int((self.labels != IGNORE_LABEL).sum())

    @property
    def num_text_tokens(self) -> int:
        """Every token but the media rows."""
        return len(self.input_ids) - sum(map(len, self.media_positions))

    @property
    def media_end(self) -> int:
        """Tokens up to and with the last media row: a sample can be cut after it, not before."""
        return 1 + max((int(of_item[-1]) for of_item in self.media_positions if len(of_item)), default=-1)

    def cut(self, max_tokens: int) -> EncodedSample:
        """The first tokens of the sample, its media among them."""
        return replace(self, input_ids=self.input_ids[:max_tokens], labels=self.labels[:max_tokens])


Ints = npt.NDArray[np.int64]
_WORD = "yes"
_NO_TOKEN, _NOTHING = -1, (False, False)
_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")
"""White space as tokenizers have it, which is a little less than Python's."""
_MAX_CACHED = 100_000


class _Special(NamedTuple):
    id: int
    supervised: bool


class _Text(NamedTuple):
    text: str
    supervised: tuple[tuple[int, int], ...]
    """Ranges of characters that carry loss."""


class _Rows(NamedTuple):
    pad: int
    num_rows: int
    item: int


_Piece = _Special | _Text | _Rows


class ChatTokenizer:
    """A `tokenizer.json` bound to a chat template and to the special tokens of a model family.

    Args:
        path: A file `tokenizers.Tokenizer` can load.
        rules: Whose `media_tokens` and layouts mark media.
        template: Name or file of the chat template, see `ChatTemplate.load`.
        in_texts: Special tokens that texts may name.

    Raises:
        ConfigError: a file does not load, the tokenizer draws lots, or it lacks a special token or does not mark one as
            special; or texts may name what only template or media write; or text between special tokens is not encoded
            as it is alone.
    """

    def __init__(self, path: Path, rules: MediaRules, template: str = "chatml", in_texts: Sequence[str] = ()) -> None:
        self._tokenizer = load_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._template = ChatTemplate.load(template)
        self._media_tokens = dict(rules.media_tokens)
        media = [t for m in self._media_tokens.values() for t in (m.begin, m.pad, m.end) if t]
        added = self._tokenizer.get_added_tokens_decoder()
        known = {token.content for token in added.values() if token.special}
        written = {token for token in known if token in self._template.source}
        # ChatML tokens are asked for by name: a tokenizer without them would spell them out, unnoticed.
        control = re.findall(r"<\|[a-z_]+\|>", self._template.source)
        needed = sorted({*written, *media, *rules.special_tokens, *control})
        self._special = special_ids(self._tokenizer, needed, path, rules.name)
        self.nameable = frozenset(known - set(needed))
        self._in_texts = ids_in_texts(self._tokenizer, self.nameable, in_texts, path)
        self._allowed = one_of(self._in_texts)
        self._not_allowed = one_of(sorted(known - set(self._in_texts)))
        placeholders = {kind: tokens.in_template for kind, tokens in self._media_tokens.items()}
        self._shown = RenderedTurns(self._template, one_of(known), placeholders)
        # A template may put a token together, `'<|' + role + '|>'`, or have it of the tokenizer's config.
        self._ids = self._special | {token.content: number for number, token in added.items() if token.special}
        self._split = one_of(self._ids)
        self._eats = {number: (token.lstrip, token.rstrip) for number, token in added.items() if token.special}
        self._num_tokens = functools.lru_cache(_MAX_CACHED)(self._count_written)
        self._check_pieces(path)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids of the template's and the family's special tokens, by token."""
        return dict(self._special)

    def check(self, sample: AnnotatedSample) -> None:
        """Refuse a sample whose turns the chat template does not show.

        Raises:
            BadSample: it refuses their roles or texts, or what it writes cannot be distinguished from them.
        """
        try:
            self._shown(sample.turns)
        except ConfigError as error:
            raise BadSample(error.what) from error

    def spelled_out(self, sample: AnnotatedSample) -> set[str]:
        """Special tokens that texts of the sample name and that are encoded in characters."""
        found = {name for turn in sample.turns for name in self._not_allowed.findall(turn.text)}
        return {name for name in found if not PLACEHOLDER.fullmatch(name)}

    def encode(
        self, samples: Sequence[AnnotatedSample], layouts: Sequence[Sequence[Layout]]
    ) -> Iterator[EncodedSample]:
        """Token ids, labels and media positions of samples whose media items have these layouts, one by one.

        Args:
            samples: What to encode; one call of the tokenizer's threads for all.
            layouts: One per media item of each, in order.

        Raises:
            KeyError: the family takes no media of some kind in a sample.
            ValueError: a sample has not one layout per media item.
            BadSample: as `check`.
        """
        pieces = [list(self._pieces(s, items)) for s, items in zip(samples, layouts, strict=True)]
        texts = [p.text for of_sample in pieces for p in of_sample if isinstance(p, _Text)]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for of_sample, items in zip(pieces, layouts, strict=True):  # of many tokens: the caller need not hold all
            yield _joined(of_sample, encodings, len(items))

    def prompt(self, turns: Sequence[Turn], media: Sequence[MediaRef], layouts: Sequence[Layout]) -> EncodedSample:
        """What a model is given to answer a conversation: everything in front of the answer that would come next.

        Raises:
            BadSample: as `check`.
        """
        sample = AnnotatedSample(0, "", (*turns, Turn("assistant", _WORD)), tuple(media))
        self.check(sample)
        (found,) = self.encode([sample], [layouts])
        return found.cut(int(np.flatnonzero(found.labels != IGNORE_LABEL)[0]))

    @property
    def end_of_answer(self) -> int | None:
        """Id of the special token that ends an answer; None where the template writes none."""
        found = self._example(_WORD)
        last = int(found.input_ids[found.labels != IGNORE_LABEL][-1])
        return last if last in self._ids.values() else None

    def template_tokens(self, num_answers: int) -> tuple[int, int]:
        """(all, supervised) tokens a template writes around so many questions and answers."""
        found = self._example("", num_answers)
        words = num_answers * len(self._tokenizer.encode(_WORD, add_special_tokens=False))
        return found.num_text_tokens - words, found.num_supervised_tokens - words

    def template_tokens_for(self, kind: str) -> int:
        """Tokens a template writes for a media item besides its layout; negative where it leaves some of that out.

        Raises:
            ConfigError: it refuses media of this kind.
            KeyError: the family takes none.
        """
        layout = self._media_tokens[kind].wrap(1)
        with_item, without = self._example(f"<{kind}>{_WORD}", item=MediaRef(kind, "")), self._example(_WORD)
        return with_item.num_text_tokens - without.num_text_tokens - self.layout_tokens(layout)

    def _example(self, question: str, num_answers: int = 1, item: MediaRef | None = None) -> EncodedSample:
        media = (item,) if item else ()
        turns = (Turn("user", question), Turn("assistant", _WORD)) * num_answers
        layouts = [self._media_tokens[ref.kind].wrap(1) for ref in media]
        return next(self.encode([AnnotatedSample(0, "", turns, media)], [layouts]))

    def layout_tokens(self, layout: Layout) -> int:
        """Tokens of a layout besides its rows."""
        return sum(self._num_tokens(entry) for entry in layout if isinstance(entry, str))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids with special tokens shown; for people and reports."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _pieces(self, sample: AnnotatedSample, layouts: Sequence[Layout]) -> Iterator[_Piece]:
        """The sample from left to right; two texts never meet without a special token or rows between them."""
        if len(layouts) != len(sample.media):
            raise ValueError(f"{len(layouts)} layouts for {len(sample.media)} media items")
        text, ranges, after_answer, before = "", [], False, _NO_TOKEN
        for content, supervised, special in self._runs(sample, layouts):
            if isinstance(content, str) and special is None:
                if supervised and content:
                    ranges.append((len(text), len(text) + len(content)))
                text += content
                after_answer = supervised or (after_answer and not content)
                continue
            token = content[0] if isinstance(content, tuple) else special if special is not None else _NO_TOKEN
            yield from self._between(text, ranges, before, token)
            text, ranges, before = "", [], token
            if isinstance(content, tuple):
                yield _Rows(*content)
            elif special is not None:
                yield _Special(special, supervised or after_answer)
            after_answer = supervised
        yield from self._between(text, ranges, before, _NO_TOKEN)

    def _between(self, text: str, ranges: list[tuple[int, int]], before: int, after: int) -> Iterator[_Text]:
        """Text between two special tokens, without the white space that either takes as its own."""
        start, stop = 0, len(text)
        if self._eats.get(before, _NOTHING)[1]:
            start = stop - len(text.lstrip(_SPACE))
        if self._eats.get(after, _NOTHING)[0]:
            stop = max(start, len(text.rstrip(_SPACE)))
        if start < stop:
            kept = ((max(first, start) - start, min(last, stop) - start) for first, last in ranges)
            yield _Text(text[start:stop], tuple(range_ for range_ in kept if range_[0] < range_[1]))

    def _runs(
        self, sample: AnnotatedSample, layouts: Sequence[Layout]
    ) -> Iterator[tuple[str | tuple[int, int, int], bool, int | None]]:
        """(text or rows, whether it carries loss, id if it is a special token), from left to right."""
        for part in self._shown(sample.turns):
            if isinstance(part, TurnText):
                turn = sample.turns[part.turn]
                # An empty answer would teach nothing but to stop, so it carries no loss at all.
                is_learnt = turn.role in ("assistant", PLAIN_ROLE) and turn.has_loss and bool(turn.text.strip())
                yield from self._named(part.text, is_learnt)
            elif isinstance(part, Item):
                tokens = self._media_tokens[sample.media[part.number].kind]
                layout = layouts[part.number]
                for entry in tokens.in_its_place(layout) if part.in_template else layout:
                    if isinstance(entry, int):
                        yield (self._special[tokens.pad], entry, part.number), False, None
                    else:
                        yield from self._written(entry)
            else:
                yield from self._written(part)

    def _named(self, text: str, supervised: bool) -> Iterator[tuple[str, bool, int | None]]:
        """Text of a turn, in which some special tokens may be written by name."""
        at = 0
        for match in self._allowed.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], supervised, None
            yield match[0], supervised, self._in_texts[match[0]]
            at = match.end()
        yield text[at:], supervised, None

    def _written(self, text: str) -> Iterator[tuple[str, bool, int | None]]:
        """Text of a template or layout, where special tokens are written by name."""
        at = 0
        for match in self._split.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], False, None
            yield match[0], False, self._ids[match[0]]
            at = match.end()
        if at < len(text):
            yield text[at:], False, None

    def _count_written(self, text: str) -> int:
        """Tokens of text in which special tokens are written by name."""
        written = list(self._written(text))
        plain = [part for part, _, special in written if special is None]
        encoded = self._tokenizer.encode_batch(plain, add_special_tokens=False)
        return len(written) - len(plain) + sum(map(len, encoded))

    def _check_pieces(self, path: Path) -> None:
        """Refuse a tokenizer for which a conversation is more than its pieces."""
        sample = AnnotatedSample(0, "", (Turn("user", "the cat "), Turn("assistant", " sat\n")), ())
        try:
            shown = self._shown(sample.turns)
        except (ConfigError, BadSample):
            return  # rows tell
        text = "".join(
            part.text if isinstance(part, TurnText) else part for part in shown if not isinstance(part, Item)
        )
        self._tokenizer.encode_special_tokens = False
        whole = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        if whole != next(self.encode([sample], [[]])).input_ids.tolist():
            raise ConfigError(
                "the tokenizer encodes text between special tokens differently than on its own (a prefix before "
                "words, or "
                "special tokens that are `single_word`), which is not supported",
                where=str(path),
                hint="use a tokenizer without them, such as Qwen's",
            )


def _joined(pieces: Sequence[_Piece], encodings: Iterator[Encoding], num_items: int) -> EncodedSample:
    """Pieces of one sample end to end; `encodings` has those of its texts next."""
    # Lists of what is between rows, and arrays of rows, of which there may be many.
    ids: list[Any] = [[]]
    labels: list[Any] = [[]]
    positions: list[list[Ints]] = [[] for _ in range(num_items)]
    length = 0
    for piece in pieces:
        if isinstance(piece, _Rows):
            positions[piece.item].append(np.arange(length, length + piece.num_rows))
            ids += [np.full(piece.num_rows, piece.pad), []]
            labels += [np.full(piece.num_rows, IGNORE_LABEL), []]
            length += piece.num_rows
            continue
        if isinstance(piece, _Special):
            own, learnt = [piece.id], [piece.id if piece.supervised else IGNORE_LABEL]
        else:
            own, learnt = (found := next(encodings)).ids, [IGNORE_LABEL] * len(found)
            if piece.supervised:
                learnt = np.where(_supervised(found, piece), own, IGNORE_LABEL).tolist()
        ids[-1] += own
        labels[-1] += learnt
        length += len(own)
    all_labels = _end_to_end(labels)
    all_labels[:1] = IGNORE_LABEL  # nothing stands before it to predict it from
    return EncodedSample(_end_to_end(ids), all_labels, tuple(map(_end_to_end, positions)))


def _end_to_end(parts: Sequence[Any]) -> Ints:
    return np.concatenate(parts or [[]], dtype=np.int64, casting="unsafe")  # an empty list is of floats


def _supervised(encoding: Encoding, piece: _Text) -> npt.NDArray[np.bool_]:
    """Per token, whether any of its characters carries loss."""
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), bool)
    for start, stop in piece.supervised:
        mask |= (offsets[:, 1] > start) & (offsets[:, 0] < stop)
    return mask
