"""Datasets of a size, and the two ways through them that are timed."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import shutil
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo import make_demo_dataset
from dflop.data.demo_text import train_tokenizer
from dflop.data.headers import MediaHeader, read_header
from dflop.data.profile import DatasetRef, profile_shard
from dflop.data.shapes import ShapeRules
from dflop.data.sizes import profile_sizes, read_sizes
from dflop.data.tokens import ChatTokenizer
from dflop.models import load_family, load_rules
from dflop.models.media import MediaRules
from dflop.records import MediaItem, SampleShape

SMALL = "small image"
"""Under one megapixel: the others are what a crawl of photographs holds."""

SUFFIXES = {
    "image": {".jpg", ".jpeg", ".png", ".webp"},
    "video": {".mp4", ".webm", ".mkv", ".mov"},
    "audio": {".wav", ".flac", ".mp3", ".ogg"},
}
RATIOS = {"image": 20.0, SMALL: 20.0, "video": 50.0, "audio": None}
MOST = {"image": 20_000, SMALL: 20_000, "video": 2_000, "audio": 20_000}
"""A video header takes milliseconds: 2000 say as much as 20,000."""
DECODERS = {
    "image": "decode + Qwen2VL image processor",
    SMALL: "decode + Qwen2VL image processor",
    "video": "decode + patches of its frames",
    "audio": "decode + Whisper features",
}
NUM_DECODED = {"image": 45, SMALL: 90, "video": 8, "audio": 30}
FAMILIES = ("llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl")


def demo_media(folder: Path) -> Path:
    """Media of the demo dataset."""
    make_demo_dataset(folder, num_samples=320)
    return folder / "media"


def link_files(folder: Path, media: Path, kind: str, num_samples: int) -> tuple[DatasetRef, list[Path]]:
    """A dataset of one file per sample: the real ones of this kind, over and over."""
    copies = folder / "files"
    copies.mkdir(parents=True)
    files = []
    only_small, kind = kind == SMALL, "image" if kind == SMALL else kind
    for number, path in enumerate(sorted(p for p in media.rglob("*") if p.suffix.lower() in SUFFIXES[kind])):
        if "hostile" in path.parts or (only_small and not _is_small(path)):
            continue
        files.append(Path(shutil.copy(path, folder / f"{number}{path.suffix}")))
    rows = []
    for number, path in enumerate(islice(cycle(files), num_samples)):
        os.link(path, copies / f"{number}{path.suffix}")
        said = [{"from": "human", "value": f"<{kind}>\nWhat is this?"}, {"from": "gpt", "value": "What it is."}]
        rows.append(json.dumps({"id": str(number), kind: f"{number}{path.suffix}", "conversations": said}))
    return _dataset(folder, rows, copies), files


def _is_small(path: Path) -> bool:
    header = read_header("image", path)
    return header.width_px * header.height_px < 1_000_000


def conversations(folder: Path, num_samples: int) -> tuple[DatasetRef, list[list[dict[str, str]]]]:
    """Questions and answers of 5 to 300 words out of Python's own documentation."""
    folder.mkdir(parents=True)
    words = " ".join(pydoc_data.topics.topics.values()).split(" ")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 1, num_samples), 5, 300).astype(int)
    starts = rng.integers(0, len(words) - 300, num_samples)
    chats = [
        [
            {"role": "user", "content": " ".join(words[s : s + 9])},
            {"role": "assistant", "content": " ".join(words[s : s + n])},
        ]
        for s, n in zip(starts, lengths, strict=True)
    ]
    rows = [json.dumps({"id": str(i), "messages": chat}) for i, chat in enumerate(chats)]
    return _dataset(folder, rows, folder), chats


def profile(dataset: DatasetRef, cache: Path | None = None) -> tuple[float, int]:
    """(seconds, healthy samples) of the profiler in this process, its start included."""
    start = time.perf_counter()
    shapes, _ = profile_shard(dataset, _family(), 0, 1, key="bench", cache=cache)
    return time.perf_counter() - start, len(shapes)


def decode_per_sample(kind: str, files: Sequence[Path]) -> float:
    """Seconds per file of decoding and of the processor, whose construction does not count."""
    family = _family()
    chosen = list(islice(cycle(files), max(NUM_DECODED[kind], len(files))))
    if kind in ("image", SMALL):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor: Any = Qwen2VLImageProcessorPil(max_pixels=family.media["max_pixels"])
    start = time.perf_counter()
    for path in chosen:
        if kind in ("image", SMALL):
            processor(images=decode_image(path), return_tensors="np")
        elif kind == "audio":
            _features(decode_audio(path, 16_000))
        else:
            _decode_frames(family, path)
    return (time.perf_counter() - start) / len(chosen)


def _decode_frames(family: Any, path: Path) -> None:
    h = read_header("video", path)
    size = {"width_px": h.width_px, "height_px": h.height_px, "num_frames": h.num_frames, "duration_s": h.duration_s}
    placed = family.place("video", **size)
    frames = decode_video(path, family.frame_indices(h.num_frames, h.duration_s))
    from dflop.data.load import resize

    family.item_array("video", resize(frames, family.frame_size_px(placed.grid)), placed.grid)


def _features(waveform: np.ndarray) -> None:
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=128)(waveform, sampling_rate=16_000, padding=False, truncation=False)


def apply_chat_template_per_sample(dataset: DatasetRef, chats: Sequence[list[dict[str, str]]]) -> float:
    """Seconds per conversation of the way a training script goes: template and tokenizer, one at a time."""
    from transformers import PreTrainedTokenizerFast

    from dflop.data.chat import BUILT_IN

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(dataset.tokenizer), chat_template=BUILT_IN["chatml"])
    chosen = chats[:2000]
    tokenizer.apply_chat_template(chosen[0])
    start = time.perf_counter()
    for chat in chosen:
        tokenizer.apply_chat_template(chat)
    return (time.perf_counter() - start) / len(chosen)


def profile_sizes_for(path: Path, family: str) -> int:
    """Profiles a table of sizes; returns how many rows it has."""
    rules = _rules(family)
    shapes, bad = profile_sizes(read_sizes(path), rules)
    return len(shapes) + len(bad)


def place_row_by_row(path: Path, family: str, num_rows: int = 3000) -> float:
    """Seconds for all rows of the obvious way, a record after the other, scaled from some."""
    rules = _rules(family)
    table = read_sizes(path)
    step = max(1, len(table) // num_rows)
    rows = table.gather_every(step).to_dicts()
    start = time.perf_counter()
    for index, row in enumerate(rows):
        items = [i for i in _items(row, rules.media) if i is not None]
        num_tokens = row["prompt_tokens"] + row["response_tokens"] + sum(i.num_rows for i in items)
        SampleShape("bench", index, row["id"], num_tokens, row["response_tokens"], num_tokens, tuple(items))
    return (time.perf_counter() - start) * len(table) / len(rows)


def _items(row: dict[str, Any], media: MediaRules) -> list[MediaItem | None]:
    sizes = [("image", w, h, 1, 0.0) for w, h in zip(row["image_w"], row["image_h"], strict=True)]
    for w, h, frames, seconds in zip(
        row["video_w"], row["video_h"], row["video_frames"], row["video_seconds"], strict=True
    ):
        sizes.append(("video", w, h, frames or round(seconds * 30), seconds))
    return [_item(media, MediaHeader(*size), len(row["image_w"])) for size in sizes]


def _item(media: MediaRules, h: MediaHeader, num_images: int) -> MediaItem | None:
    try:
        p = media.place(
            h.kind, width_px=h.width_px, height_px=h.height_px, num_frames=h.num_frames, duration_s=h.duration_s,
            num_images=num_images,
        )  # fmt: skip
    except ValueError:
        return None
    return MediaItem(
        h.kind, "", h.width_px, h.height_px, h.num_frames, h.duration_s, p.module, p.grid, p.num_tokens,
        p.sum_sq_tokens, p.num_rows,
    )  # fmt: skip


def _rules(family: str) -> ShapeRules:
    rules = load_rules(family, {}, {})
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"dflop-bench-tokenizer-{os.getpid()}.json"
    _write_tokenizer(path, rules)
    tokenizer = ChatTokenizer(path, rules)
    path.unlink()
    return ShapeRules("bench", rules, tokenizer, 8192, ("shrink",))


def _dataset(folder: Path, rows: Sequence[str], media_root: Path) -> DatasetRef:
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    _write_tokenizer(folder / "tokenizer.json", _family())
    return DatasetRef.of_file(folder / "rows.jsonl", media_root, folder / "tokenizer.json", 1 << 20)


def _write_tokenizer(path: Path, rules: MediaRules) -> None:
    """A byte-level BPE of 4096 tokens with the special tokens of a family."""
    train_tokenizer(list(pydoc_data.topics.topics.values()), path)
    tokenizer = Tokenizer.from_file(str(path))
    media = [t for m in rules.media_tokens.values() for t in (m.begin, m.pad, m.end) if t]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*media, *rules.special_tokens)])
    tokenizer.save(str(path))


def _family() -> Any:
    return load_family("qwen2_5_omni_thinker", {}, {})
