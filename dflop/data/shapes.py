"""One annotation row to what it costs every module, or to the reason it cannot be trained on.

Checks run from cheap to dear: row, media kinds, text length, then one header per media item. Every way out is a value:
a `SampleShape` or a `QuarantinedSample`; a row never stops a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef, confine
from dflop.data.formats.annotation_file import AnnotationFile
from dflop.data.headers import BadMedia, read_header
from dflop.data.tokens import ChatTokenizer
from dflop.models.family import Family
from dflop.records import MediaItem, QuarantinedSample, SampleShape


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """Everything besides the row that decides a sample's shape."""

    profile_key: str
    family: Family
    tokenizer: ChatTokenizer
    media_root: Path
    max_llm_tokens: int


def shape_of_row(annotations: AnnotationFile, index: int, rules: ShapeRules) -> SampleShape | QuarantinedSample:
    """Shape of row `index`, or why it has none; a malformed row is a quarantine row like any other."""
    try:
        sample = annotations.sample(index)
    except BadSample as error:
        return _quarantined(rules, index, error.sample_id, error)
    return shape_of(sample, rules)


def shape_of(sample: AnnotatedSample, rules: ShapeRules) -> SampleShape | QuarantinedSample:
    """Shape of a well-formed sample, or why it has none: its media, its length or nothing to learn from."""
    try:
        return _shape(sample, rules)
    except BadSample as error:
        return _quarantined(rules, sample.sample_index, sample.sample_id, error)


def _shape(sample: AnnotatedSample, rules: ShapeRules) -> SampleShape:
    for ref in sample.media:
        if ref.kind not in rules.family.media_tokens:
            takes = ", ".join(sorted(rules.family.media_tokens)) or "text only"
            raise BadSample(f"family {rules.family.name} takes no {ref.kind} (takes: {takes})", path=ref.path)
    num_text_tokens, num_supervised_tokens = rules.tokenizer.count(sample)
    if num_supervised_tokens == 0:
        raise BadSample("no supervised tokens: every answer is empty")
    _check_length(num_text_tokens, rules)
    items = tuple(media_item(ref, rules.family, rules.media_root) for ref in sample.media)
    num_llm_tokens = num_text_tokens + sum(item.num_rows for item in items)
    _check_length(num_llm_tokens, rules)
    return SampleShape(
        profile_key=rules.profile_key,
        sample_index=sample.sample_index,
        sample_id=sample.sample_id,
        num_text_tokens=num_text_tokens,
        num_supervised_tokens=num_supervised_tokens,
        num_llm_tokens=num_llm_tokens,
        items=items,
    )


def media_item(ref: MediaRef, family: Family, media_root: Path) -> MediaItem:
    """Size of one media file and what the family makes of it.

    Raises:
        BadSample: the path leaves the media root, the header is bad, or the family refuses the size.
    """
    path = confine(media_root, ref.path)
    try:
        header = read_header(ref.kind, path)
    except BadMedia as error:
        raise BadSample(f"{ref.kind}: {error.reason}", path=ref.path) from error
    size = (header.width_px, header.height_px, header.num_frames, header.duration_s)
    try:
        placement = family.place(ref.kind, width_px=size[0], height_px=size[1], num_frames=size[2], duration_s=size[3])
    except ValueError as error:
        raise BadSample(f"{ref.kind}: {error}", path=ref.path) from error
    return MediaItem(
        ref.kind,
        ref.path,
        *size,
        module=placement.module,
        grid=placement.grid,
        num_tokens=placement.num_tokens,
        sum_sq_tokens=placement.sum_sq_tokens,
        num_rows=placement.num_rows,
    )


def _check_length(num_tokens: int, rules: ShapeRules) -> None:
    if num_tokens > rules.max_llm_tokens:
        raise BadSample(f"sample too long: {num_tokens} tokens > max_llm_tokens {rules.max_llm_tokens}")


def _quarantined(rules: ShapeRules, index: int, sample_id: str, error: BadSample) -> QuarantinedSample:
    return QuarantinedSample(
        profile_key=rules.profile_key,
        sample_index=index,
        sample_id=sample_id,
        phase="profile",
        path=error.path,
        reason=error.reason,
    )
