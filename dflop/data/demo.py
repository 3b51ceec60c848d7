"""A small multimodal dataset made on the spot from files Python packages ship: no hub, no download, one seed.

320 samples in the LLaVA format (35 % one image, 12 % two to five, 15 % video, 13 % audio, 25 % text) take 5-10 s
and 12 MB. Texts, photos and sounds are real, longer sounds and most videos derived from them; every row says so in
`origin` and `provenance.json` names package, version, licence and path behind every file. The folder appears
complete or not at all: it is built next to its place and renamed into it.

    <folder>/annotations.jsonl  media/{image,video,audio}/  tokenizer.json  provenance.json
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dflop.data import demo_media as media
from dflop.data import demo_text
from dflop.data.dataset_profile import DatasetRef
from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo_sources import Source, find_files, load_sources, package_versions
from dflop.data.headers import read_header
from dflop.errors import ConfigError
from dflop.models.media import MediaRules

DEMO_VERSION = 2
"""Raise when the same seed gives another dataset."""
MIXTURE = {"single_image": 0.35, "multi_image": 0.12, "video": 0.15, "audio": 0.13, "text": 0.25}
_KINDS = {"single_image": "image", "multi_image": "image", "video": "video", "audio": "audio"}
_PAN_FPS, _CITY_FPS = Fraction(10), Fraction(25, 2)  # every second frame of the shipped 25 frames per second
_MIN_SOUND_S = 0.3  # shorter shipped sounds appear only joined to others

Row = dict[str, Any]


def make_demo_dataset(
    folder: Path,
    num_samples: int = 320,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    *,
    max_llm_tokens: int = 8192,
    rules: MediaRules | None = None,
) -> DatasetRef:
    """Paths of the demo dataset in `folder`, made now unless the same one is already there.

    Args:
        folder: Created; must not exist, be empty, or hold this very dataset.
        num_samples: Rows of the annotation file.
        seed: Fixes every draw: equal seeds give equal annotations, byte for byte, on one machine.
        progress: Hears what is being made.
        max_llm_tokens: Passed on to the returned reference.
        rules: Of the family it is made for: the tokenizer knows its special tokens, and there are no rows with media
            that it does not take. None: for Qwen2.5-Omni, which takes all kinds.

    Raises:
        ConfigError: packages of `dflop[demo]` are missing, or the folder holds something else.
    """
    tokens = _special_tokens(rules)
    made_for = "" if rules is None or set(tokens) == set(demo_text.SPECIAL_TOKENS) else rules.name
    identity: Row = {"dflop_demo_version": DEMO_VERSION, "seed": seed, "num_samples": num_samples, "made_for": made_for}
    if not _is_made(folder, identity):
        versions = package_versions()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            made = Path(scratch) / "dataset"
            builder = _Builder(made, np.random.default_rng(seed), versions, progress or (lambda _: None))
            builder.build(_groups(rules), num_samples, tokens, identity)
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

    def __init__(
        self, folder: Path, rng: np.random.Generator, versions: dict[str, str], progress: Callable[[str], None]
    ) -> None:
        self.folder, self.rng, self.versions, self.progress = folder, rng, versions, progress
        self.files: list[Row] = []
        self.texts = list(demo_text.load_texts())
        found = {kind: [(s, _find(s)) for s in sources] for kind, sources in load_sources().items()}
        self.photos = [(source, Image.fromarray(decode_image(path))) for source, path in found["photos"]]
        self.sounds = found["sounds"]
        self.waves = [decode_audio(path, media.SAMPLE_RATE_HZ) for _, path in self.sounds]
        ((self.city_source, city),) = found["videos"]
        self.city = decode_video(city, range(0, read_header("video", city).num_frames, 2))

    def build(self, shares: dict[str, float], num_samples: int, tokens: tuple[str, ...], identity: Row) -> None:
        for kind in ("image", "video", "audio"):
            (self.folder / "media" / kind).mkdir(parents=True)
        # One group per row: the shares by largest remainder, shuffled.
        edges = np.round(np.cumsum([0.0, *shares.values()]) * num_samples).astype(int)
        rows: list[Row] = []
        for index, group in enumerate(self.rng.permutation(np.repeat(list(shares), np.diff(edges)))):
            if index % 80 == 0:
                self.progress(f"demo dataset: {index} of {num_samples} samples")
            rows.append({"id": f"demo-{index:05d}", **getattr(self, f"_{group}")(f"{index:05d}")})
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (self.folder / "annotations.jsonl").write_text("".join(lines), "utf-8")
        self.progress("demo dataset: training the tokenizer")
        turns = [turn["value"] for row in rows for turn in row["conversations"]]
        prose = [paragraph for text in self.texts for paragraph in text.paragraphs]
        demo_text.train_tokenizer(prose + turns, self.folder / "tokenizer.json", tokens)
        descriptions = Source("scikit-learn", "sklearn/datasets/descr/*.rst", "BSD-3-Clause", "")
        topics = Source("python", "pydoc_data/topics.py", "PSF-2.0", "")
        texts = [self._origin(topics), self._origin(descriptions)]
        provenance = {**identity, "packages": self.versions, "texts": texts, "files": self.files}
        (self.folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", "utf-8")
        self.progress(f"demo dataset: {num_samples} samples with {len(self.files)} media files")

    def _single_image(self, name: str) -> Row:
        caption, size, path = self._image(name, 300)
        turns = ["<image>\nWhat does the picture show?", f"The picture shows {caption}."]
        if self.rng.random() < 0.5:
            turns += ["How large is it?", f"It is {size[0]} pixels wide and {size[1]} pixels high."]
        return _row("image", path, turns, "derived: crop of a shipped photo")

    def _multi_image(self, name: str) -> Row:
        images = [self._image(f"{name}-{number}", 200) for number in range(self.rng.integers(2, 6))]
        listed = " ".join(f"Picture {n + 1} shows {caption}." for n, (caption, _, _) in enumerate(images))
        widest = max(range(len(images)), key=lambda n: images[n][1][0])
        question = "<image>" * len(images) + "\nDescribe the pictures one by one."
        answer = f"Picture {widest + 1}, with {images[widest][1][0]} pixels."
        turns = [question, listed, "Which of them is the widest?", answer]
        return _row("image", [path for _, _, path in images], turns, "derived: crops of shipped photos")

    def _video(self, name: str) -> Row:
        path, size = f"video/{name}.mp4", media.video_size(self.rng)
        duration_s = media.lognormal(self.rng, 4.0, 0.9, 1.0, 12.0)
        if self.rng.random() < 0.3:
            source, fps = self.city_source, _CITY_FPS
            num_frames = min(round(duration_s * fps), len(self.city))
            begin = int(self.rng.integers(len(self.city) - num_frames + 1))
            cut = self.city[begin : begin + num_frames]
            frames: Iterator[media.Pixels] = (np.asarray(Image.fromarray(frame).resize(size)) for frame in cut)
            origin, answer = "derived: cut of a shipped video, resized", f"The clip shows {source.caption}."
        else:
            source, photo = self.photos[self.rng.integers(len(self.photos))]
            fps, num_frames = _PAN_FPS, round(duration_s * _PAN_FPS)
            frames = media.pan(self.rng, photo, size, num_frames)
            origin, answer = "derived: pan over a shipped photo", f"The camera moves over a photo of {source.caption}."
        media.write_video(frames, self._file(path, origin, [source]), fps)
        length = f"It has {num_frames} frames and lasts {float(num_frames / fps):.1f} seconds."
        return _row("video", path, ["<video>\nWhat does the clip show?", answer, "How long is it?", length], origin)

    def _audio(self, name: str) -> Row:
        if self.rng.random() < 0.15:
            shortest = _MIN_SOUND_S * media.SAMPLE_RATE_HZ
            chosen = self.rng.choice([i for i, wave in enumerate(self.waves) if len(wave) >= shortest])
            source, shipped = self.sounds[chosen]
            path, origin, sources = f"audio/{name}{shipped.suffix}", "shipped file, unchanged", [source]
            shutil.copyfile(shipped, file := self._file(path, origin, sources))
        else:
            picks = self.rng.permutation(len(self.sounds))[: self.rng.integers(1, 5)]
            num_samples = round(media.lognormal(self.rng, 5.0, 0.8, 1.0, 30.0) * media.SAMPLE_RATE_HZ)
            path, sources = f"audio/{name}.flac", [self.sounds[i][0] for i in picks]
            origin = "derived: shipped sounds joined, repeated and cut"
            gap = np.zeros(media.SAMPLE_RATE_HZ // 4, np.float32)
            joined = np.concatenate([part for i in picks for part in (self.waves[i], gap)])
            media.write_audio(np.resize(joined, num_samples), file := self._file(path, origin, sources))
        heard = f"The recording is made of {', '.join(s.caption for s in sources)}."
        length = f"It lasts {read_header('audio', file).duration_s:.1f} seconds."
        return _row("audio", path, ["<audio>\nWhat is to be heard?", heard, "How long is it?", length], origin)

    def _text(self, _: str) -> Row:
        question, answer, source = demo_text.question_and_answer(self.rng, self.texts)
        return _row("", "", [question, answer], f"documentation of {source}")

    def _image(self, name: str, median_px: float) -> tuple[str, tuple[int, int], str]:
        """Write one crop; its caption, size and path."""
        source, photo = self.photos[self.rng.integers(len(self.photos))]
        size = media.image_size(self.rng, median_px)
        path = f"image/{name}.{'png' if max(size) < 128 else 'jpg'}"
        file = self._file(path, "derived: crop of a shipped photo, resized", [source])
        media.crop(self.rng, photo, size).save(file, quality=85)
        return source.caption, size, path

    def _file(self, path: str, origin: str, sources: list[Source]) -> Path:
        """Where a media file is to be written; its provenance is noted."""
        origins = [self._origin(source) for source in sources]
        self.files.append({"file": f"media/{path}", "origin": origin, "sources": origins})
        return self.folder / "media" / path

    def _origin(self, source: Source) -> Row:
        version = self.versions.get(source.package) or ".".join(map(str, sys.version_info[:3]))
        return {"package": source.package, "version": version, "path": source.path, "licence": source.licence}


def _find(source: Source) -> Path:
    return find_files(source.package, f"/{source.path}")[0]


def _special_tokens(rules: MediaRules | None) -> tuple[str, ...]:
    """What the tokenizer must know for a family."""
    if rules is None:
        return demo_text.SPECIAL_TOKENS
    of_media = [token for kind in rules.media_tokens.values() for token in (kind.begin, kind.end, kind.pad) if token]
    tokens = tuple(dict.fromkeys([*demo_text.CHAT_TOKENS, *of_media, *rules.special_tokens]))
    return demo_text.SPECIAL_TOKENS if set(tokens) == set(demo_text.SPECIAL_TOKENS) else tokens


def _groups(rules: MediaRules | None) -> dict[str, float]:
    """Share of each group of rows; groups with media that a family does not take have none."""
    kept = {g: s for g, s in MIXTURE.items() if rules is None or _KINDS.get(g, "text") in {*rules.media_tokens, "text"}}
    return kept if len(kept) == len(MIXTURE) else {g: s / sum(kept.values()) for g, s in kept.items()}


def _row(kind: str, paths: str | list[str], turns: list[str], origin: str) -> Row:
    said = [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(turns)]
    return {**({kind: paths} if kind else {}), "conversations": said, "origin": origin}
