"""Media rules of any model: what stands for a picture, a clip or a sound of a size in a text, read from its processor.

The first of these ways that equals real calls on a grid of sizes (`media_check.py`) is a medium's rule:

- `sizes`: the processor's own count, `_get_num_multimodal_tokens`, between constant words; microseconds an item;
- `shapes`: the processor run on media without values (`media_processor.py`); milliseconds an item;
- `fitted`: a constant for pictures, a line over a clip's frames, a staircase over a sound's samples; microseconds;
- `calls`: the processor run on a blank item of the size; as slow as the processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflop.models.generic.media_processor import MediaProcessor
from dflop.models.media import Layout, MediaHeader

PROBES: Mapping[str, MediaHeader] = {
    "image": MediaHeader("image", 224, 224, 1, 0.0),
    "video": MediaHeader("video", 112, 112, 40, 20.0),
    "audio": MediaHeader("audio", 0, 0, 0, 2.0),
}
"""Items of ordinary size, by which a medium's pad and the words around it are found."""
STEPS, LONG_S = 32, 90.0
"""Rows of a sound between two edges of its staircase, and seconds up to which it was looked at."""
Expand = Callable[[MediaHeader], Layout]


@dataclass(frozen=True, slots=True)
class MediaRule:
    """What replaces the placeholder of an item of one medium."""

    kind: str
    way: str
    """`sizes`, `shapes`, `fitted` or `calls`."""
    pad: str
    """The token that stands for a row of the encoder."""
    expand: Expand
    """Raises what the processor raises where it refuses an item."""

    def num_rows(self, header: MediaHeader) -> int:
        """Rows that an item hands to the LLM."""
        return sum(part for part in self.expand(header) if isinstance(part, int))


def find_pad(processor: MediaProcessor, kind: str) -> str:
    """The token that stands for a row of a medium: of those added to a vocabulary, the one that a call repeats most.

    Raises:
        LookupError: the call has no such token.
    """
    added = {number: token for token, number in processor.processor.tokenizer.get_added_vocab().items()}
    counts = Counter(number for number in processor.token_ids(PROBES[kind]) if number in added)
    if not counts:
        raise LookupError("the processor writes no placeholder token for it")
    return str(added[counts.most_common(1)[0][0]])


def rule_of(processor: MediaProcessor, kind: str, pad: str, way: str) -> MediaRule:
    """The rule of a medium in one way.

    Raises:
        LookupError: the processor does not answer in this way.
    """
    return MediaRule(kind, way, pad, WAYS[kind][way](processor, kind, pad))


def _by_sizes(processor: MediaProcessor, kind: str, pad: str) -> Expand:
    before, num_rows, after = _one_run(processor.expanded(PROBES[kind], pad, has_values=True))
    extra = processor.stated_tokens(PROBES[kind]) - num_rows  # some count the words around, too
    return lambda header: (*before, processor.stated_tokens(header) - extra, *after)


def _by_shapes(processor: MediaProcessor, kind: str, pad: str) -> Expand:
    return lambda header: processor.expanded(header, pad)


def _by_calls(processor: MediaProcessor, kind: str, pad: str) -> Expand:
    return lambda header: processor.expanded(header, pad, has_values=True)


def _constant(processor: MediaProcessor, kind: str, pad: str) -> Expand:
    layout = processor.expanded(PROBES[kind], pad, has_values=True)
    return lambda header: layout


def _line(processor: MediaProcessor, kind: str, pad: str) -> Expand:
    """Rows of a clip as a line over the frames that are taken."""
    short, long = PROBES["video"], MediaHeader("video", 112, 112, 80, 40.0)
    before, low, after = _one_run(processor.expanded(short, pad, has_values=True))
    _, high, _ = _one_run(processor.expanded(long, pad, has_values=True))

    def num_taken(header: MediaHeader) -> int:
        return len(processor.frame_indices(header.num_frames, header.num_frames / header.duration_s))

    more = num_taken(long) - num_taken(short)
    slope = (high - low) // more if more else 0
    return lambda header: (*before, low + slope * (num_taken(header) - num_taken(short)), *after)


def _staircase(processor: MediaProcessor, kind: str, pad: str) -> Expand:
    """Rows of a sound as a staircase over its samples, which ends where the processor cuts sounds off.

    Lengths go through strides and pooling, each a division that rounds; together these are one division by the product.
    A sound longer than those that were looked at is counted on silence.
    """
    rate = processor.sample_rate

    def rows(num_samples: int) -> int:
        header = MediaHeader("audio", 0, 0, 0, num_samples / rate)
        return _one_run(processor.expanded(header, pad, has_values=True))[1]

    before, num_first, after = _one_run(processor.expanded(PROBES["audio"], pad, has_values=True))
    first = _edge(rows, round(PROBES["audio"].duration_s * rate), num_first + 1)
    last = _edge(rows, first, num_first + 1 + STEPS)
    step, rest = divmod(last - first, STEPS)
    if rest:
        raise LookupError(f"{STEPS} tokens span {last - first} samples: not in equal steps")
    most = rows(round(LONG_S * rate))

    def expand(header: MediaHeader) -> Layout:
        if header.duration_s > LONG_S:
            return processor.expanded(header, pad)
        return (*before, min(num_first + 1 + (processor.num_samples(header) - first) // step, most), *after)

    return expand


WAYS: Mapping[str, Mapping[str, Callable[[MediaProcessor, str, str], Expand]]] = {
    "image": {"sizes": _by_sizes, "shapes": _by_shapes, "fitted": _constant, "calls": _by_calls},
    "video": {"shapes": _by_shapes, "fitted": _line, "calls": _by_calls},
    "audio": {"sizes": _by_sizes, "fitted": _staircase, "calls": _by_calls},
}
"""Media kind -> ways to count it, in the order in which they are tried."""


def _edge(rows: Callable[[int], int], low: int, wanted: int) -> int:
    """Least number of samples from `low` on that gives `wanted` rows.

    Raises:
        LookupError: no sound of up to two minutes gives as many.
    """
    high = low * 2
    while rows(high) < wanted:
        low, high = high, high * 2
        if high > 1 << 22:
            raise LookupError(f"no sound has {wanted} tokens")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rows(middle) >= wanted else (middle, high)
    return high


def _one_run(layout: Layout) -> tuple[Layout, int, Layout]:
    """(words before, rows, words after) of a layout with one run of rows.

    Raises:
        LookupError: it has several, or none.
    """
    places = [i for i, part in enumerate(layout) if isinstance(part, int)]
    if len(places) != 1:
        raise LookupError(f"an item has {len(places)} runs of placeholder tokens")
    at = places[0]
    return layout[:at], int(layout[at]), layout[at + 1 :]
