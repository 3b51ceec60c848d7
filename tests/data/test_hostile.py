"""Real broken files and rows: each ends as a shape or as a quarantine row with a reason, none as an exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.headers import BadMedia
from dflop.data.profile import DatasetRef, profile_shard
from tests.data.helpers import TinyFamily

HEALTHY = {
    "aspect_8000x3": True,
    "cmyk": True,
    "palette": True,
    "gray16": True,
    "rgba": True,
    "exif_rotated": True,
    "one_frame-video": True,
    "no_duration-video": True,
    "fewer-placeholders": True,
    "special-tokens": True,
    "400-turns": True,
    "duplicate-id": True,
    "zero_bytes": False,
    "text_named": False,
    "bomb_60000x60000_header": False,
    "one_pixel": False,
    "truncated-video": False,
    "zero_bytes-video": False,
    "zero_video_frames_audio_only-video": False,
    "zero_samples-audio": False,
    "truncated-audio": False,
    "missing-image": False,
    "missing-video": False,
    "missing-audio": False,
    "directory": False,
    "path-traversal": False,
    "empty-conversation": False,
    "no-conversations-key": False,
    "null-value": False,
    "number-value": False,
    "empty-answer": False,
    "only-human": False,
    "gpt-first": False,
    "unknown-role": False,
    "more-placeholders": False,
    "placeholder-in-answer": False,
    "empty-image-list": False,
    "null-image": False,
    "control-chars": False,
    "huge-text-1M-chars": False,
    "huge-one-word": False,
    "200-images": False,
}


def test_every_hostile_row_is_a_shape_or_a_quarantine_row(
    shared_media: Path, tokenizer_path: Path, family: TinyFamily
) -> None:
    path = shared_media / "hostile.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    shapes, quarantined = profile_shard(DatasetRef.of_file(path, shared_media, tokenizer_path, 8192), family, 0, 1)
    assert sorted([s.sample_index for s in shapes] + [q.sample_index for q in quarantined]) == list(range(len(rows)))
    healthy = {s.sample_id.removeprefix("hostile-") for s in shapes}
    refused = {q.sample_id.removeprefix("hostile-") for q in quarantined}
    assert {name for name, good in HEALTHY.items() if good} <= healthy
    assert not {name for name, good in HEALTHY.items() if not good} & healthy
    assert all(q.reason and "\n" not in q.reason and len(q.reason) < 300 for q in quarantined)
    # Damage behind a sound header is for the decoder to find.
    assert healthy | refused == {row["id"].removeprefix("hostile-") for row in rows}


def test_malformed_lines_are_quarantine_rows(shared_media: Path, tokenizer_path: Path, family: TinyFamily) -> None:
    dataset = DatasetRef.of_file(shared_media / "hostile_malformed.jsonl", shared_media, tokenizer_path, 8192)
    shapes, quarantined = profile_shard(dataset, family, 0, 1)
    assert shapes == []
    reasons = [q.reason for q in quarantined]
    assert [reason.split(" ")[0] for reason in reasons] == [
        "conversation",
        "row",
        "row",
        "row",
        "row",
        "row",
        *["conversation"] * 2,
    ]


@pytest.mark.parametrize("name", ["truncated.jpg", "zero_bytes.png", "text_named.jpg", "bomb_60000x60000_header.png"])
def test_bad_images_do_not_decode(shared_media: Path, name: str) -> None:
    with pytest.raises(BadMedia):
        decode_image(shared_media / "hostile" / name)


@pytest.mark.parametrize("name", ["cmyk.jpg", "palette.png", "gray16.png", "rgba.png", "exif_rotated.jpg"])
def test_awkward_images_decode(shared_media: Path, name: str) -> None:
    assert decode_image(shared_media / "hostile" / name).ndim == 3


def test_bad_video_and_audio_do_not_decode(shared_media: Path) -> None:
    hostile = shared_media / "hostile"
    for name in ("truncated.mp4", "zero_bytes.mp4", "zero_video_frames_audio_only.mp4"):
        with pytest.raises(BadMedia):
            decode_video(hostile / name, [0])
    for name in ("zero_samples.wav", "truncated.wav"):
        with pytest.raises(BadMedia):
            decode_audio(hostile / name, 16_000)
    assert decode_video(hostile / "no_duration.webm", [0, 5]).shape[0] == 2
