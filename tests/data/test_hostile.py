"""Real broken files and rows: each ends as a shape or as a quarantine row with a reason, none as an exception."""

import json

from dflop.data.dataset_profile import DatasetRef, profile_shard
from dflop.data.headers import BadMedia
from dflop.data.load_media import load_item
from dflop.models import load_family

FINE, DAMAGED = "fine", "damaged"
"""A sample to train on; one whose header is sound and whose body is found out by the decoder."""
EXPECTED = {
    "truncated": DAMAGED, "zero_bytes": "image: empty file (0 bytes)",
    "text_named": "image: not an image in any of JPEG, PNG,", "bitflips": DAMAGED,
    "bomb_60000x60000_header": "image: image too large: Image size (3600000000 pixels) exceeds limit of",
    "one_pixel": "image: 1x1 px, shorter side below min_side_px 2",
    "aspect_8000x3": "image: aspect ratio of 8000x3 exceeds 200", "cmyk": FINE, "palette": FINE, "gray16": FINE,
    "rgba": FINE, "exif_rotated": FINE, "truncated-video": "video: broken container:",
    "zero_bytes-video": "video: empty file (0 bytes)", "zero_video_frames_audio_only-video": "video: no video stream",
    "one_frame-video": FINE, "no_duration-video": FINE, "zero_samples-audio": "audio: no audio samples",
    "truncated-audio": "audio: broken container:", "missing-image": "image: file not found",
    "missing-video": "video: file not found", "missing-audio": "audio: file not found",
    "directory": "image: not a regular file", "path-traversal": "media path leaves the media root",
    "empty-conversation": "conversation has no turns", "no-conversations-key": "no `conversations`,",
    "null-value": "turn 0 has no text, but None", "number-value": "turn 0 has no text, but 3",
    "empty-answer": "no supervised tokens: every answer is empty", "only-human": "conversation has no assistant turn",
    "gpt-first": "conversation starts with an assistant turn",
    "unknown-role": "turn 0 has unknown role 'narrator'; valid: human, user,",
    "more-placeholders": "2 <image> placeholders for 1 image files", "fewer-placeholders": FINE,
    "placeholder-in-answer": "turn 1 (assistant) holds <image>; media belong to user turns",
    "empty-image-list": "1 <image> placeholders for 0 image files",
    "null-image": "1 <image> placeholders for 0 image files", "special-tokens": FINE,
    "control-chars": "turn 0 is not valid Unicode: surrogates not allowed at character 4",
    "huge-text-1M-chars": "sample too long:", "huge-one-word": "sample too long:", "200-images": "sample too long:",
    "400-turns": FINE, "duplicate-id": FINE,
}  # fmt: skip


def test_every_hostile_row_ends_as_expected(shared_media, tokenizer_path):
    path = shared_media / "hostile.jsonl"
    rows = [json.loads(line)["id"].removeprefix("hostile-") for line in path.read_text("utf-8").splitlines()]
    assert (len(rows), set(rows)) == (45, set(EXPECTED))
    rules = load_family("qwen2_5_omni_thinker", {}, {})
    dataset = DatasetRef.of_file(path, shared_media, tokenizer_path, 8192)
    shapes, quarantined = profile_shard(dataset, rules, 0, 1)
    found: dict[int, str] = {q.sample_index: q.reason for q in quarantined}
    for shape in shapes:
        found[shape.sample_index] = FINE
        for item in shape.items:
            try:
                load_item(shared_media / item.path, item, rules)
            except BadMedia:
                found[shape.sample_index] = DAMAGED
    assert sorted(found) == list(range(45))
    wrong = {name: found[i] for i, name in enumerate(rows) if not found[i].startswith(EXPECTED[name])}
    assert wrong == {}
    assert all("\n" not in q.reason and len(q.reason) < 300 for q in quarantined)
