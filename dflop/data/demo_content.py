"""What the demo is made of: files that Python packages ship, their texts, a tokenizer, and videos and sounds.

Packages are never imported, only their file lists read. `configs/datasets/demo_sources.json` has each file's licence,
and a caption written by hand after what the package's own documentation says of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dflop import resources
from dflop.errors import ConfigError

Pixels = npt.NDArray[np.uint8]
Source = dict[str, str]
"""`package`, `version`, `path`, `licence` and `caption` of a file; the path is the end of that in the package."""

Text = tuple[str, str, tuple[str, ...]]
"""The documentation that it comes from, its topic, paragraphs of prose."""

SAMPLE_RATE_HZ = 16_000
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL_TOKENS: tuple[str, ...] = (
    *CHAT_TOKENS, "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|audio_eos|>",
    "<|AUDIO|>",
)  # fmt: skip
VOCAB_SIZE = 4096


def load_sources() -> dict[str, list[Source]]:
    """`photos`, `sounds`, `videos` and `texts`.

    Raises:
        ConfigError: packages are not installed.
    """
    found = json.loads((resources.path("configs") / "datasets" / "demo_sources.json").read_text("utf-8"))
    versions, missing = {"python": platform.python_version()}, []
    for package in dict.fromkeys(source["package"] for of_kind in found.values() for source in of_kind):
        try:
            versions[package] = versions.get(package) or importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        reason = f"the demo dataset needs packages that are not installed: {', '.join(missing)}"
        raise ConfigError(reason, hint="pip install 'dflop[demo]'")
    return {kind: [{**s, "version": versions[s["package"]]} for s in of_kind] for kind, of_kind in found.items()}


def find_files(source: Source) -> list[Path]:
    """Installed files of a source, whose path may be a pattern, sorted.

    Raises:
        ConfigError: there are none.
    """
    distribution = importlib.metadata.distribution(source["package"])
    files = [file for file in distribution.files or () if file.match(source["path"])]
    paths = sorted(Path(str(distribution.locate_file(file))).resolve() for file in files)
    if not paths or not all(path.is_file() for path in paths):
        reason = f"{source['package']} {source['version']} is installed without its file {source['path']}"
        raise ConfigError(reason, hint="pip install --force-reinstall 'dflop[demo]'")
    return paths


def load_texts(descriptions: Source) -> list[Text]:
    """Python's language reference by topic and scikit-learn's descriptions of datasets, sorted."""
    from pydoc_data.topics import topics

    rst = [("Python", f"`{name}`", text) for name, text in sorted(topics.items())]
    for path in find_files(descriptions):
        rst.append(("scikit-learn", f"the dataset `{path.stem.replace('_', ' ')}`", path.read_text("utf-8")))
    return [(source, topic, prose) for source, topic, text in rst if (prose := _paragraphs(text))]


def _paragraphs(rst: str) -> tuple[str, ...]:
    """Prose paragraphs on one line each; headings, directives, code and tables are left out."""
    blocks = (block for block in re.split(r"\n\s*\n", rst) if not re.match(r"\s|\.\.|[*=~|+-]{2}|:", block))
    prose = (" ".join(block.split()) for block in blocks if not re.search(r"\n[*=~^-]{3}", block))
    # A tag in prose (`<video>` in an example, say) would read as a placeholder.
    return tuple(p for p in prose if len(p) >= 40 and not re.search(r"<(image|video|audio)>", p))


def train_tokenizer(texts: Iterable[str], path: Path, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """Train a byte-level BPE on `texts`, in which every text encodes, and write it as `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def write_video(frames: Iterable[Pixels], path: Path, fps: Fraction) -> None:
    """Write an MP4 with H.264, or MPEG-4 part 2 where FFmpeg was built without libx264."""
    codec = "libx264" if "libx264" in av.codec.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        assert isinstance(stream, av.VideoStream)
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        if codec == "libx264":
            # Measured with PyAV 18.1: with macroblock-tree rate control the same frames give other bytes each run.
            stream.options = {"preset": "veryfast", "crf": "28", "x264-params": "mbtree=0"}
        for number, pixels in enumerate(frames):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def write_audio(samples: npt.NDArray[np.float32], path: Path) -> None:
    """Write mono 16-bit FLAC at `SAMPLE_RATE_HZ`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("flac", rate=SAMPLE_RATE_HZ, layout="mono", format="s16")
        assert isinstance(stream, av.AudioStream)
        quantised = np.round(np.clip(samples, -1, 1) * 32767).astype(np.int16)
        for start in range(0, len(quantised), 4096):  # with times of their own, as WAV asks for them
            block = np.ascontiguousarray(quantised[None, start : start + 4096])
            frame = av.AudioFrame.from_ndarray(block, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE_HZ, start, Fraction(1, SAMPLE_RATE_HZ)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
