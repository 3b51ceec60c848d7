"""Holds the media rules of a model against real calls of its processor, medium by medium.

What differs refuses the medium, never the model: a model whose clips cannot be counted still trains on pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dflop.models.generic.media_processor import MediaProcessor, one_line
from dflop.models.generic.tokens import PROBES, WAYS, MediaRule, find_pad, rule_of
from dflop.models.media import MediaHeader

MOST_SHOWN = 3
_SIDES = (1, 9, 28, 56, 100, 224, 337, 448, 640, 1000)
_LONG = ((8000, 40), (40, 8000), (3000, 100), (100, 3000), (2500, 300), (300, 2500), (4000, 21), (1300, 10))
_LARGE = ((1920, 1080), (1080, 1920), (1568, 1024), (2048, 1536))
PICTURES: Sequence[tuple[int, int]] = (
    *((side, _SIDES[(i * 7 + k * 3) % 10]) for k in range(4) for i, side in enumerate(_SIDES)),
    *((side, side + 1) for side in _SIDES[2:]), *_LONG, *_LARGE,
)  # fmt: skip
"""(width, height) of 60 pictures: tiny to large, all aspects, few pixels where the aspect allows."""
CLIPS = (
    (2, 1.0, 64, 64), (4, 2.0, 224, 224), (8, 4.0, 320, 180), (9, 3.0, 45, 44), (16, 8.0, 100, 300),
    (24, 1.0, 130, 260), (31, 3.1, 31, 65), (64, 2.56, 160, 90), (150, 5.0, 96, 64), (7, 70.0, 500, 56),
)  # fmt: skip
"""(frames, seconds, width, height)."""
SOUNDS_S = (0.11, 0.5, 0.77777, 1.0, 2.3456, 5.0, 9.99, 20.125, 31.7, 61.3)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An item for which a rule and the processor differ."""

    header: MediaHeader
    counted: tuple[int, int]
    """(rows, words around them) by the rule."""
    real: tuple[int, int]
    """The same of a real call."""

    def __str__(self) -> str:
        h = self.header
        size = f"{h.duration_s:g} s" if h.kind == "audio" else f"{h.width_px}x{h.height_px}"
        frames = f", {h.num_frames} frames" if h.kind == "video" else ""
        return f"{size}{frames}: counted {sum(self.counted)} tokens, the processor has {sum(self.real)}"


@dataclass(frozen=True, slots=True)
class MediaCheck:
    """How the rule of a medium compares with real calls."""

    kind: str
    rule: MediaRule | None
    """The rule that equals them; None: the medium is refused."""
    num_items: int
    """Items that the processor takes, of the grid."""
    mismatches: tuple[Mismatch, ...] = ()
    """The first of the best rule that differs."""
    reason: str = ""
    """Why the medium is refused."""
    several: str = ""
    """How two items in a sample differ from each alone; empty: they do not."""

    @property
    def is_exact(self) -> bool:
        """Whether the medium may be used."""
        return self.rule is not None

    def __str__(self) -> str:
        """The verdict in words."""
        if self.rule is None:
            return self.problem
        return f"equal for {self.num_items} sizes, by {self.rule.way}" + f"; {self.several}" * bool(self.several)

    @property
    def problem(self) -> str:
        """Why the medium is refused, with the sizes that differ; empty where it may be used."""
        return "; ".join([self.reason, *map(str, self.mismatches)] if self.reason else [])


def check_media(processor: MediaProcessor) -> Mapping[str, MediaCheck]:
    """Holds every medium of a model's processor against real calls on a grid of sizes."""
    return {kind: check_medium(processor, kind, grid(kind)) for kind in processor.kinds}


def grid(kind: str) -> Sequence[MediaHeader]:
    """Items whose real calls decide: 60 pictures, 10 clips, 10 sounds."""
    if kind == "image":
        return [MediaHeader(kind, *size, 1, 0.0) for size in PICTURES]
    if kind == "video":
        return [MediaHeader(kind, width, height, num, seconds) for num, seconds, width, height in CLIPS]
    return [MediaHeader(kind, 0, 0, 0, seconds) for seconds in SOUNDS_S]


def check_medium(processor: MediaProcessor, kind: str, headers: Sequence[MediaHeader]) -> MediaCheck:
    """The first way whose rule equals real calls on all of the items that the processor takes."""
    try:
        pad = find_pad(processor, kind)
    except Exception as error:  # whatever a processor raises, it does not take the medium
        return MediaCheck(kind, None, 0, reason=f"the processor refuses it: {one_line(error)}")
    real, refused = _real_counts(processor, pad, headers)
    if not real:
        return MediaCheck(kind, None, 0, reason=f"the processor refuses every size: {refused}")
    least: tuple[Mismatch, ...] = ()
    reasons = []
    for way in WAYS[kind]:
        try:
            rule = rule_of(processor, kind, pad, way)
            found = _mismatches(processor, rule, real)
        except Exception as error:
            reasons.append(f"{way}: {one_line(error)}")
            continue
        if not found:
            return MediaCheck(kind, rule, len(real), several=_several(processor, rule))
        reasons.append(f"{way}: {len(found)} of {len(real)} differ")
        least = found if not least or len(found) < len(least) else least
    return MediaCheck(kind, None, len(real), least[:MOST_SHOWN], "; ".join(reasons))


def _real_counts(
    processor: MediaProcessor, pad: str, headers: Sequence[MediaHeader]
) -> tuple[dict[MediaHeader, tuple[int, int]], str]:
    """(rows, words) of every item that the processor takes, and why it refuses the last of the others."""
    pad_id = processor.processor.tokenizer.convert_tokens_to_ids(pad)
    found, refused = {}, ""
    for header in headers:
        try:
            ids = processor.token_ids(header)
        except Exception as error:
            refused = one_line(error)
            continue
        num_rows = ids.count(pad_id)
        found[header] = num_rows, len(ids) - num_rows
    return found, refused


def _several(processor: MediaProcessor, rule: MediaRule) -> str:
    """What the processor makes of two items in one prompt, where the rule does not count them right."""
    first = PROBES[rule.kind]
    longer_s = first.duration_s * (2 if rule.kind == "audio" else 1)
    pair = first, replace(first, width_px=first.width_px * 2, duration_s=longer_s)
    try:
        real = processor.token_ids(*pair).count(processor.processor.tokenizer.convert_tokens_to_ids(rule.pad))
    except Exception as error:
        return f"two items in a sample are refused: {one_line(error)}"
    counted = sum(map(rule.num_rows, pair))
    return "" if counted == real else f"two items in a sample: counted {counted} tokens, the processor has {real}"


def _mismatches(
    processor: MediaProcessor, rule: MediaRule, real: Mapping[MediaHeader, tuple[int, int]]
) -> tuple[Mismatch, ...]:
    """Items whose rows or words differ; words that a processor adds to every prompt are not the item's."""
    found, extra = [], None
    before, _, after = processor.prompt(rule.kind)
    for header, counts in real.items():
        layout = rule.expand(header)
        runs = [part for part in layout if isinstance(part, int)]
        text = before + "".join(rule.pad if isinstance(part, int) else part for part in layout) + after
        num_words = processor.num_words(text) - len(runs)
        extra = counts[1] - num_words if extra is None else extra
        if (sum(runs), num_words + extra) != counts:
            found.append(Mismatch(header, (sum(runs), num_words + extra), counts))
    return tuple(found)
