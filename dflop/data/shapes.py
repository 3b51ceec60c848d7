"""Annotated samples to what they cost every module, or to the reason they cannot be trained on.

Per sample: media kinds, one header per media item, the family's placement, then tokens, counted for many samples in
one call. Every way out is a value, a `SampleShape` or a `QuarantinedSample`; a row never stops a profile.

A sample over `max_llm_tokens` is handled by the steps of `overlong`, in order, until it fits: `shrink` halves the
family's limits of frames, tiles and pixels level by level; `truncate` cuts tokens off the end, never a media row. What
was done is part of the shape, and the trainer does the same. A sample that no step makes fit is quarantined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef
from dflop.data.headers import BadMedia
from dflop.data.tokens import EncodedSample
from dflop.models.media import Layout, MediaHeader, MediaRules, Placement
from dflop.records import MediaItem, QuarantinedSample, SampleShape

OVERLONG_STEPS = ("shrink", "truncate")
_SLACK_S, _SLACK_FRAC = 1.0, 0.1
"""By how much what a row says of a duration may fall short of it, as where it was rounded."""

ReadHeader = Callable[[int, MediaRef], MediaHeader]
"""Size of a media item of a sample; raises `BadMedia` or `BadSample`."""


class Counts(NamedTuple):
    """Lengths of a sample that has no texts to cut off."""

    num_tokens: int
    num_text_tokens: int
    num_supervised_tokens: int


class Tokenizer(Protocol):
    """What shapes need of a `ChatTokenizer`."""

    def check(self, sample: AnnotatedSample) -> None:
        """Raise `BadSample` where the chat template does not show the turns."""

    def encode(
        self, samples: Sequence[AnnotatedSample], layouts: Sequence[Sequence[Layout]]
    ) -> Iterator[EncodedSample | Counts]:
        """Each sample with media items of these layouts."""


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """Everything besides the row that decides a sample's shape."""

    profile_key: str
    media: MediaRules
    tokenizer: Tokenizer
    max_llm_tokens: int
    overlong: tuple[str, ...] = ()
    """Steps out of `OVERLONG_STEPS`; none: too long is quarantined."""
    min_side_px: int = 1
    """Pictures with a shorter side are quarantined; processors would blow up a tracking pixel to full size."""


class _Draft(NamedTuple):
    """A sample whose media are placed, not yet counted."""

    sample: AnnotatedSample
    headers: list[MediaHeader]
    placements: list[Placement]
    level: int

    @property
    def layouts(self) -> list[Layout]:
        return [p.layout for p in self.placements]


def shapes_of(
    rows: Sequence[tuple[int, AnnotatedSample | BadSample]], rules: ShapeRules, read: ReadHeader
) -> list[SampleShape | QuarantinedSample]:
    """Shapes of many rows, in order; a malformed row is a quarantine row like any other.

    Args:
        rows: (sample_index, the sample or why it cannot be read).
        rules: Family, tokenizer and limits.
        read: Gives the headers.
    """
    found: list[SampleShape | QuarantinedSample | None] = [None] * len(rows)
    drafts: dict[int, _Draft] = {}
    for number, (index, sample) in enumerate(rows):
        try:
            if isinstance(sample, BadSample):
                raise sample
            rules.tokenizer.check(sample)
            headers = [_header(index, ref, rules, read) for ref in sample.media]
            _check_durations(sample, headers)
            drafts[number] = _Draft(sample, headers, _place(sample, headers, rules, 0), 0)
        except BadSample as error:
            found[number] = _quarantined(rules, index, sample, error)
    encoded = rules.tokenizer.encode([d.sample for d in drafts.values()], [d.layouts for d in drafts.values()])
    for (number, draft), of_draft in zip(drafts.items(), encoded, strict=True):
        try:
            found[number] = _shape(draft, of_draft, rules)
        except BadSample as error:
            found[number] = _quarantined(rules, rows[number][0], draft.sample, error)
    return [result for result in found if result is not None]


def _header(index: int, ref: MediaRef, rules: ShapeRules, read: ReadHeader) -> MediaHeader:
    if ref.kind not in rules.media.media_tokens:
        takes = ", ".join(sorted(rules.media.media_tokens)) or "text only"
        raise BadSample(f"family {rules.media.name} does not support {ref.kind} (supported: {takes})", path=ref.path)
    try:
        header = read(index, ref)
    except BadMedia as error:
        raise BadSample(f"{ref.kind}: {error.reason}", path=ref.path) from error
    if ref.kind != "audio" and min(header.width_px, header.height_px) < rules.min_side_px:
        size = f"{header.width_px}x{header.height_px} px"
        raise BadSample(f"{ref.kind}: {size}, shorter side below min_side_px {rules.min_side_px}", path=ref.path)
    return header


def _check_durations(sample: AnnotatedSample, headers: Sequence[MediaHeader]) -> None:
    """Raise `BadSample` where the row says of its one recording that it is shorter than it is: it means a part."""
    lengths_s = [header.duration_s for header in headers if header.kind != "image"]
    for key, stated_s in sample.durations if len(lengths_s) == 1 else ():
        if stated_s + max(_SLACK_S, _SLACK_FRAC * stated_s) < lengths_s[0]:
            reason = f"`{key}` is {stated_s:g}, but the recording lasts {lengths_s[0]:.1f} s: parts are not supported"
            raise BadSample(f"{reason}; to ignore the key, add it to dataset.ignored_keys", key=key)


def _place(sample: AnnotatedSample, headers: Sequence[MediaHeader], rules: ShapeRules, level: int) -> list[Placement]:
    num_images = sum(ref.kind == "image" for ref in sample.media)
    placements = []
    for ref, header in zip(sample.media, headers, strict=True):
        try:
            placements.append(place(rules.media, header, num_images, level))
        except ValueError as error:
            raise BadSample(f"{ref.kind}: {error}", path=ref.path) from error
    return placements


@functools.lru_cache(maxsize=200_000)
def place(rules: MediaRules, header: MediaHeader, num_images: int, level: int) -> Placement:
    """`rules.place`, remembered: the sizes of a dataset repeat far more often than they differ.

    Raises:
        ValueError: the family's processor would refuse the item.
    """
    return rules.place(header, num_images, level)


def header_of(item: MediaItem) -> MediaHeader:
    """The header a profiled item was placed by."""
    return MediaHeader(item.kind, item.width_px, item.height_px, item.num_frames, item.duration_s)


def _shape(draft: _Draft, encoded: EncodedSample | Counts, rules: ShapeRules) -> SampleShape:
    if encoded.num_supervised_tokens == 0:
        raise BadSample("no supervised tokens: every answer is empty")
    limit, num_tokens = rules.max_llm_tokens, encoded.num_tokens
    for step in rules.overlong if num_tokens > limit else ():
        if step == "shrink":
            draft, encoded = _shrunk(draft, encoded, rules)
        elif isinstance(encoded, EncodedSample) and encoded.num_tokens > limit >= encoded.media_end:
            kept = encoded.cut(limit)
            if kept.num_supervised_tokens == 0:
                raise BadSample(f"no supervised tokens among the first {limit}")
            return _of(draft, kept, rules, encoded.num_tokens - limit)
    if encoded.num_tokens > limit:
        tried = f" (after: {', '.join(rules.overlong)})" if rules.overlong else ""
        raise BadSample(f"sample too long: {num_tokens} tokens > max_llm_tokens {limit}{tried}")
    return _of(draft, encoded, rules)


def _shrunk(draft: _Draft, encoded: EncodedSample | Counts, rules: ShapeRules) -> tuple[_Draft, EncodedSample | Counts]:
    """The sample at the first level at which it fits; at the last one if at none, or as it was without media."""
    while encoded.num_tokens > rules.max_llm_tokens and draft.headers and draft.level < rules.media.max_level:
        level = draft.level + 1
        draft = draft._replace(placements=_place(draft.sample, draft.headers, rules, level), level=level)
        (encoded,) = rules.tokenizer.encode([draft.sample], [draft.layouts])
    return draft, encoded


def _of(draft: _Draft, encoded: EncodedSample | Counts, rules: ShapeRules, num_cut_tokens: int = 0) -> SampleShape:
    items = tuple(
        header.item(ref.path, placed)
        for ref, header, placed in zip(draft.sample.media, draft.headers, draft.placements, strict=True)
    )
    return SampleShape(
        profile_key=rules.profile_key,
        sample_index=draft.sample.sample_index,
        sample_id=draft.sample.sample_id,
        num_text_tokens=encoded.num_text_tokens,
        num_supervised_tokens=encoded.num_supervised_tokens,
        num_llm_tokens=encoded.num_tokens,
        items=items,
        media_level=draft.level,
        num_cut_tokens=num_cut_tokens,
    )


def _quarantined(
    rules: ShapeRules, index: int, sample: AnnotatedSample | BadSample, error: BadSample
) -> QuarantinedSample:
    return QuarantinedSample(
        profile_key=rules.profile_key,
        sample_index=index,
        sample_id=sample.sample_id,
        phase="profile",
        path=error.path,
        reason=error.reason,
    )
