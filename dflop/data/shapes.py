"""Annotated samples to what they cost every module, or to the reason they cannot be trained on.

Per sample: media kinds, one header per media item, the family's placement, then tokens, counted for many samples in
one call. Every way out is a value, a `SampleShape` or a `QuarantinedSample`; a row never stops a profile.

A sample over `max_llm_tokens` is handled by the steps of `overlong`, in order, until it fits: `shrink` halves the
family's limits of frames, tiles and pixels level by level; `truncate` cuts tokens off the end, never a media row. What
was done is part of the shape, and the trainer does the same. A sample that no step makes fit is quarantined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef
from dflop.data.headers import BadMedia
from dflop.data.tokens import ChatTokenizer, EncodedSample
from dflop.models.media import Layout, MediaHeader, MediaRules, Placement
from dflop.records import MediaItem, QuarantinedSample, SampleShape

_SLACK_S, _SLACK_FRAC = 1.0, 0.1
"""By how much what a row says of a duration may fall short of it, as where it was rounded."""

ReadHeader = Callable[[int, MediaRef], MediaHeader]
"""Size of a media item of a sample; raises `BadMedia` or `BadSample`."""


class Counts(NamedTuple):
    """Lengths of a sample that has no texts to cut off."""

    num_tokens: int
    num_text_tokens: int
    num_supervised_tokens: int


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """Everything besides the row that decides a sample's shape."""

    profile_key: str
    media: MediaRules
    tokenizer: ChatTokenizer
    max_llm_tokens: int
    overlong: tuple[str, ...] = ()
    """Steps out of `shrink` and `truncate`; none: too long is quarantined."""
    min_side_px: int = 1
    """Pictures with a shorter side are quarantined; processors would blow up a tracking pixel to full size."""


@dataclass(frozen=True, eq=False)
class Media:
    """The media of a sample under the limits of a level."""

    sample: AnnotatedSample
    rules: ShapeRules
    headers: tuple[MediaHeader, ...]
    level: int = 0

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One per item.

        Raises:
            BadSample: the family refuses an item.
        """
        num_images = sum(header.kind == "image" for header in self.headers)
        found = []
        for ref, header in zip(self.sample.media, self.headers, strict=True):
            try:
                found.append(place(self.rules.media, header, num_images, self.level))
            except ValueError as error:
                raise BadSample(f"{ref.kind}: {error}", path=ref.path) from error
        return tuple(found)

    @property
    def layouts(self) -> list[Layout]:
        return [placed.layout for placed in self.placements]

    @functools.cached_property
    def items(self) -> tuple[MediaItem, ...]:
        """As they stand in a shape."""
        media = zip(self.sample.media, self.headers, self.placements, strict=True)
        return tuple(header.item(ref.path, placed) for ref, header, placed in media)

    @functools.cached_property
    def shrunk(self) -> Media | None:
        """At the next level; None: there is none."""
        is_last = not self.headers or self.level == self.rules.media.max_level
        return None if is_last else replace(self, level=self.level + 1)


Count = Callable[[Media], EncodedSample | Counts]
"""Lengths of a sample with its media under the limits of a level."""


def shapes_of(
    rows: Sequence[tuple[int, AnnotatedSample | BadSample]], rules: ShapeRules, read: ReadHeader
) -> list[SampleShape | QuarantinedSample]:
    """Shapes of many rows, in order; a malformed row is a quarantine row like any other.

    Args:
        rows: (sample_index, the sample or why it cannot be read).
        rules: Family, tokenizer and limits.
        read: Gives the headers.
    """
    of_rows = [media_of(sample, rules, read) for _, sample in rows]
    placed = [media for media in of_rows if isinstance(media, Media)]
    encoded = rules.tokenizer.encode([media.sample for media in placed], [media.layouts for media in placed])

    def count(media: Media) -> EncodedSample:
        return next(rules.tokenizer.encode([media.sample], [media.layouts]) if media.level else encoded)

    return [
        shape_of(index, sample.sample_id, media, rules, count)
        for (index, sample), media in zip(rows, of_rows, strict=True)
    ]


def media_of(sample: AnnotatedSample | BadSample, rules: ShapeRules, read: ReadHeader) -> Media | BadSample:
    """The media of a sample, placed, or why it cannot be trained on."""
    try:
        if isinstance(sample, BadSample):
            return sample
        if sample.turns:
            rules.tokenizer.check(sample)
        media = Media(sample, rules, tuple(_header(sample.sample_index, ref, rules, read) for ref in sample.media))
        _check_durations(sample, media.headers)
        _ = media.placements
        return media
    except BadSample as error:
        return error


def _header(index: int, ref: MediaRef, rules: ShapeRules, read: ReadHeader) -> MediaHeader:
    if ref.kind not in rules.media.media_tokens:
        raise BadSample(rules.media.refusal(ref.kind), path=ref.path)
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


def shape_of(
    index: int, sample_id: str, media: Media | BadSample, rules: ShapeRules, count: Count
) -> SampleShape | QuarantinedSample:
    """The shape of a sample, or why it has none.

    Args:
        index: Its `sample_index`.
        sample_id: Its id.
        media: Its media at level 0, or why it cannot be trained on.
        rules: Family, tokenizer and limits.
        count: Gives its lengths.
    """
    try:
        if isinstance(media, BadSample):
            raise media
        media, encoded, num_cut_tokens = _fitted(media, rules, count)
    except BadSample as error:
        return QuarantinedSample(
            profile_key=rules.profile_key,
            sample_index=index,
            sample_id=sample_id,
            phase="profile",
            path=error.path,
            reason=error.reason,
        )
    return SampleShape(
        profile_key=rules.profile_key,
        sample_index=index,
        sample_id=sample_id,
        num_text_tokens=encoded.num_text_tokens,
        num_supervised_tokens=encoded.num_supervised_tokens,
        num_llm_tokens=encoded.num_tokens,
        items=media.items,
        media_level=media.level,
        num_cut_tokens=num_cut_tokens,
        sum_sq_llm_tokens=rules.media.sum_sq_llm_tokens(encoded.num_tokens),
    )


def _fitted(media: Media, rules: ShapeRules, count: Count) -> tuple[Media, EncodedSample | Counts, int]:
    """(media, lengths, tokens cut off) of a sample that fits.

    Raises:
        BadSample: no step makes it fit.
    """
    encoded, limit = count(media), rules.max_llm_tokens
    if encoded.num_supervised_tokens == 0:
        raise BadSample("no supervised tokens: every answer is empty")
    num_tokens = encoded.num_tokens
    for step in rules.overlong if num_tokens > limit else ():
        while step == "shrink" and encoded.num_tokens > limit and media.shrunk is not None:
            media = media.shrunk
            encoded = count(media)
        if (
            step == "truncate"
            and isinstance(encoded, EncodedSample)
            and encoded.num_tokens > limit >= encoded.media_end
        ):
            kept = encoded.cut(limit)
            if kept.num_supervised_tokens == 0:
                raise BadSample(f"no supervised tokens among the first {limit}")
            return media, kept, encoded.num_tokens - limit
    if encoded.num_tokens > limit:
        tried = f" (after: {', '.join(rules.overlong)})" if rules.overlong else ""
        raise BadSample(f"sample too long: {num_tokens} tokens > max_llm_tokens {limit}{tried}")
    return media, encoded, 0
