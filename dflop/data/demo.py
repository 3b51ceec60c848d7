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
import numpy.typing as npt
from PIL import Image

from dflop.data import demo_media as media
from dflop.data import demo_text
from dflop.data.dataset_profile import DatasetRef
from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo_sources import CITY_VIDEO, PHOTOS, SOUNDS, Source, find, package_versions
from dflop.data.headers import read_header
from dflop.errors import ConfigError
from dflop.models.media import MediaRules

DEMO_VERSION = 2
"""Raise when the same seed gives another dataset."""

MIXTURE = {"single_image": 0.35, "multi_image": 0.12, "video": 0.15, "audio": 0.13, "text": 0.25}
_KINDS = {"single_image": "image", "multi_image": "image", "video": "video", "audio": "audio"}

_CITY_FPS = Fraction(25, 2)  # every second frame of the shipped 25 frames per second
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
    identity: dict[str, int | str] = {"dflop_demo_version": DEMO_VERSION, "seed": seed, "num_samples": num_samples}
    identity["made_for"] = (
        "" if rules is None or set(_special_tokens(rules)) == set(_special_tokens(None)) else rules.name
    )
    if not _is_made(folder, identity):
        versions = package_versions()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            made = Path(scratch) / "dataset"
            builder = _Builder(made, np.random.default_rng(seed), versions, progress or (lambda _: None), rules)
            builder.build(num_samples, identity)
            _publish(made, folder, identity)
    return DatasetRef.of_file(folder / "annotations.jsonl", folder / "media", folder / "tokenizer.json", max_llm_tokens)


def _is_made(folder: Path, identity: dict[str, int | str]) -> bool:
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


def _publish(made: Path, folder: Path, identity: dict[str, int | str]) -> None:
    try:
        made.rename(folder)
    except OSError:
        # Someone else made it in the meantime; theirs serves as well if it is the same.
        if not _is_made(folder, identity):
            raise


class _Builder:
    """Draws rows from one generator and writes their media; `provenance` grows by one entry per file."""

    def __init__(
        self,
        folder: Path,
        rng: np.random.Generator,
        versions: dict[str, str],
        progress: Callable[[str], None],
        rules: MediaRules | None,
    ) -> None:
        self.folder, self.rules = folder, rules
        self.rng = rng
        self.versions = versions
        self.progress = progress
        self.provenance: list[Row] = []
        self.texts = demo_text.load_texts()
        self.photos = [(source, Image.fromarray(decode_image(find(source)))) for source in PHOTOS]
        self.sounds = [(source, find(source)) for source in SOUNDS]
        self.waves = [decode_audio(path, media.SAMPLE_RATE_HZ) for _, path in self.sounds]
        self.city = self._city_frames()

    def build(self, num_samples: int, identity: dict[str, int | str]) -> None:
        for kind in ("image", "video", "audio"):
            (self.folder / "media" / kind).mkdir(parents=True)
        makers = {
            "single_image": self._single_image,
            "multi_image": self._multi_image,
            "video": self._video,
            "audio": self._audio,
            "text": self._text,
        }
        rows = []
        for index, group in enumerate(self._groups(num_samples)):
            if index % 80 == 0:
                self.progress(f"demo dataset: {index} of {num_samples} samples")
            rows.append({"id": f"demo-{index:05d}", **makers[group](f"{index:05d}")})
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (self.folder / "annotations.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        self.progress("demo dataset: training the tokenizer")
        turns = (turn["value"] for row in rows for turn in row["conversations"])
        prose = (paragraph for text in self.texts for paragraph in text.paragraphs)
        tokens = _special_tokens(self.rules)
        demo_text.train_tokenizer((*prose, *turns), self.folder / "tokenizer.json", tokens)
        provenance = {**identity, "packages": self.versions, "texts": self._text_sources(), "files": self.provenance}
        (self.folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", "utf-8")
        self.progress(f"demo dataset: {num_samples} samples with {len(self.provenance)} media files")

    def _groups(self, num_samples: int) -> list[str]:
        """One group per row: the mixture's shares by largest remainder, shuffled."""
        shares = _shares(self.rules)
        edges = np.round(np.cumsum([0.0, *shares.values()]) * num_samples).astype(int)
        groups = np.repeat(list(shares), np.diff(edges))
        return [str(group) for group in self.rng.permutation(groups)]

    def _single_image(self, name: str) -> Row:
        caption, size, path = self._image(f"{name}", 300)
        turns = [("<image>\nWhat does the picture show?", f"The picture shows {caption}.")]
        if self.rng.random() < 0.5:
            turns.append(("How large is it?", f"It is {size[0]} pixels wide and {size[1]} pixels high."))
        return _row("image", path, turns, "derived: crop of a shipped photo")

    def _multi_image(self, name: str) -> Row:
        images = [self._image(f"{name}-{number}", 200) for number in range(self.rng.integers(2, 6))]
        listed = " ".join(f"Picture {n + 1} shows {caption}." for n, (caption, _, _) in enumerate(images))
        widest = max(range(len(images)), key=lambda n: images[n][1][0])
        turns = [
            ("<image>" * len(images) + "\nDescribe the pictures one by one.", listed),
            ("Which of them is the widest?", f"Picture {widest + 1}, with {images[widest][1][0]} pixels."),
        ]
        return _row("image", [path for _, _, path in images], turns, "derived: crops of shipped photos")

    def _video(self, name: str) -> Row:
        path, size = f"video/{name}.mp4", media.video_size(self.rng)
        duration_s = media.lognormal(self.rng, 4.0, 0.9, 1.0, 12.0)
        if self.rng.random() < 0.3:
            source, fps = CITY_VIDEO, _CITY_FPS
            num_frames = min(round(duration_s * fps), len(self.city))
            begin = int(self.rng.integers(len(self.city) - num_frames + 1))
            cut = self.city[begin : begin + num_frames]
            frames: Iterator[media.Pixels] = (np.asarray(Image.fromarray(frame).resize(size)) for frame in cut)
            origin, answer = "derived: cut of a shipped video, resized", f"The clip shows {source.caption}."
        else:
            source, photo = self.photos[self.rng.integers(len(self.photos))]
            fps, num_frames = media.PAN_FPS, round(duration_s * media.PAN_FPS)
            frames = media.pan(self.rng, photo, size, num_frames)
            origin, answer = "derived: pan over a shipped photo", f"The camera moves over a photo of {source.caption}."
        media.write_video(frames, self.folder / "media" / path, fps)
        self._record(path, origin, [source])
        length = f"It has {num_frames} frames and lasts {float(num_frames / fps):.1f} seconds."
        return _row("video", path, [("<video>\nWhat does the clip show?", answer), ("How long is it?", length)], origin)

    def _audio(self, name: str) -> Row:
        if self.rng.random() < 0.15:
            chosen = self.rng.choice([i for i, wave in enumerate(self.waves) if _seconds(wave) >= _MIN_SOUND_S])
            source, shipped = self.sounds[chosen]
            path, origin, sources = f"audio/{name}{shipped.suffix}", "shipped file, unchanged", [source]
            shutil.copyfile(shipped, self.folder / "media" / path)
        else:
            picks = self.rng.permutation(len(self.sounds))[: self.rng.integers(1, 5)]
            num_samples = round(media.lognormal(self.rng, 5.0, 0.8, 1.0, 30.0) * media.SAMPLE_RATE_HZ)
            path, sources = f"audio/{name}.flac", [self.sounds[i][0] for i in picks]
            origin = "derived: shipped sounds joined, repeated and cut"
            joined = media.join_sounds([self.waves[i] for i in picks], num_samples)
            media.write_audio(joined, self.folder / "media" / path)
        self._record(path, origin, sources)
        duration_s = read_header("audio", self.folder / "media" / path).duration_s
        turns = [
            ("<audio>\nWhat is to be heard?", f"The recording is made of {', '.join(s.caption for s in sources)}."),
            ("How long is it?", f"It lasts {duration_s:.1f} seconds."),
        ]
        return _row("audio", path, turns, origin)

    def _text(self, name: str) -> Row:
        question, answer, text = demo_text.question_and_answer(self.rng, self.texts)
        return _row("", "", [(question, answer)], f"documentation of {text.source}")

    def _image(self, name: str, median_px: float) -> tuple[str, tuple[int, int], str]:
        """Write one crop; its caption, size and path."""
        source, photo = self.photos[self.rng.integers(len(self.photos))]
        size = media.image_size(self.rng, median_px)
        path = f"image/{name}.{'png' if max(size) < 128 else 'jpg'}"
        media.write_image(media.crop(self.rng, photo, size), self.folder / "media" / path)
        self._record(path, "derived: crop of a shipped photo, resized", [source])
        return source.caption, size, path

    def _city_frames(self) -> npt.NDArray[np.uint8]:
        path = find(CITY_VIDEO)
        return decode_video(path, range(0, read_header("video", path).num_frames, 2))

    def _record(self, path: str, origin: str, sources: list[Source]) -> None:
        origins = [
            {"package": s.package, "version": self.versions[s.package], "path": s.path, "licence": s.licence}
            for s in sources
        ]
        self.provenance.append({"file": f"media/{path}", "origin": origin, "sources": origins})

    def _text_sources(self) -> list[Row]:
        python = ".".join(map(str, sys.version_info[:3]))
        sklearn = self.versions["scikit-learn"]
        descriptions = {"package": "scikit-learn", "version": sklearn, "path": "sklearn/datasets/descr/*.rst"}
        return [
            {"package": "python", "version": python, "path": "pydoc_data/topics.py", "licence": "PSF-2.0"},
            {**descriptions, "licence": "BSD-3-Clause"},
        ]


def _special_tokens(rules: MediaRules | None) -> tuple[str, ...]:
    """What the tokenizer must know for a family."""
    if rules is None:
        return demo_text.SPECIAL_TOKENS
    media = [token for kind in rules.media_tokens.values() for token in (kind.begin, kind.end, kind.pad) if token]
    tokens = tuple(dict.fromkeys([*demo_text.CHAT_TOKENS, *media, *rules.special_tokens]))
    return demo_text.SPECIAL_TOKENS if set(tokens) == set(demo_text.SPECIAL_TOKENS) else tokens


def _shares(rules: MediaRules | None) -> dict[str, float]:
    """Share of each group of rows; groups with media that a family does not take have none."""
    kept = {g: s for g, s in MIXTURE.items() if rules is None or _KINDS.get(g, "text") in {*rules.media_tokens, "text"}}
    return kept if len(kept) == len(MIXTURE) else {g: s / sum(kept.values()) for g, s in kept.items()}


def _row(kind: str, paths: str | list[str], turns: list[tuple[str, str]], origin: str) -> Row:
    lines = [{"from": who, "value": text} for turn in turns for who, text in zip(("human", "gpt"), turn, strict=True)]
    return {**({kind: paths} if kind else {}), "conversations": lines, "origin": origin}


def _seconds(wave: npt.NDArray[np.float32]) -> float:
    return len(wave) / media.SAMPLE_RATE_HZ
