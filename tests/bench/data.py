"""What profiling data costs here: `python -m tests.bench.data [--media FOLDER] [--sizes FILE] [--json FILE]`.

Every figure is one process on one core, compared with the way that decodes: the Hugging Face processors on the same
files in the same run, timed on fewer samples and scaled. Files are warm; each of the samples is a separate file (hard
links), so nothing is remembered between them. FOLDER holds real images, videos and sounds in any arrangement (without
it, the demo dataset's, which are tiny: the bounds are for media as they are); FILE is a table of sizes, see
`dflop/data/size_table.py`.
"""

import json
import os
import pydoc_data.topics
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from dflop.data.chat import BUILT_IN
from dflop.data.dataset_profile import DatasetRef, profile_shard
from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo import make_demo_dataset
from dflop.data.demo_content import train_tokenizer
from dflop.data.headers import read_header
from dflop.data.ledger import names_in
from dflop.data.load_media import resize
from dflop.data.shapes import ShapeRules
from dflop.data.size_table import profile_sizes, read_sizes
from dflop.data.tokens import ChatTokenizer
from dflop.models import load_family
from dflop.models.media import MediaRules
from tests.bench.command import keep_to, options
from tests.bench.figures import Figure, finish
from tests.bench.markdown import table

NUM_SAMPLES, MOST_VIDEOS = 20_000, 2_000
"""A video header takes milliseconds: 2000 say as much as 20,000."""
SMALL = "small image"
"""Under one megapixel: the others are what a crawl of photographs holds."""
SUFFIXES = {
    "image": {".jpg", ".jpeg", ".png", ".webp"},
    "video": {".mp4", ".webm", ".mkv", ".mov"},
    "audio": {".wav", ".flac", ".mp3", ".ogg"},
}
RATIOS = {"image": 20.0, SMALL: 20.0, "video": 50.0, "audio": None}
DECODERS = {
    "image": "decode + Qwen2VL image processor",
    SMALL: "decode + Qwen2VL image processor",
    "video": "decode + patches of its frames",
    "audio": "decode + Whisper features",
}
NUM_DECODED = {"image": 45, SMALL: 90, "video": 8, "audio": 30}
FAMILIES = ("llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl")
NUM_ONE_BY_ONE = 2000


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--media", type=Path, help="folder with real media (default: those of the demo dataset)")
    parser.add_argument("--sizes", type=Path, help="Parquet table of sizes")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = "1"
    keep_to(1)
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as name:
        figures = all_figures(Path(name), args.media, args.sizes, args.samples)
        finish(figures, args.json, "pillow", "av", "tokenizers", "transformers", "polars")


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`data`: a row per figure, with the obvious other way."""
    head = ("one core, single run", "dflop", "", "the other way", "")
    return {"data": table(head, [_cells(figure) for figure in content["figures"]])}


def _cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    took_s, other_s, name = figure["seconds"], figure["other_s"], figure["name"].strip()
    other = ("", "") if other_s is None else (f"{figure['other']}, {other_s:,.1f} s", f"{other_s / took_s:.1f}x")
    return (name[0].upper() + name[1:], f"{took_s:.1f} s", figure["note"], *other)


def all_figures(folder: Path, given: Path | None, sizes: Path | None, num_samples: int) -> Iterator[Figure]:
    media = given
    if media is None:
        make_demo_dataset(folder / "demo", num_samples=320)
        media = folder / "demo" / "media"
    for kind in RATIOS:
        yield media_figure(folder / kind.replace(" ", "-"), media, kind, num_samples, is_bound=given is not None)
    yield text_figure(folder / "text", num_samples)
    yield ledger_figure(folder / "ledger", num_samples)
    yield again_figure(folder / "again", media, num_samples)
    if sizes:
        yield sizes_figure(sizes)


def media_figure(folder: Path, media: Path, kind: str, num_samples: int, *, is_bound: bool) -> Figure:
    if kind == "video":
        num_samples = min(num_samples, MOST_VIDEOS)
    dataset, files = link_files(folder, media, kind, num_samples)
    took_s, num_healthy = profile(dataset)
    decoded_s = decode_per_sample(kind, files) * num_samples
    note = f"{num_healthy / took_s:,.0f} samples/s, {num_samples / decoded_s:,.1f} decoded"
    name = f"profile {num_samples} samples of one {kind}"
    return Figure(name, took_s, None, DECODERS[kind], decoded_s, RATIOS[kind] if is_bound else None, note)


def text_figure(folder: Path, num_samples: int) -> Figure:
    dataset, chats = conversations(folder, num_samples)
    took_s, num_healthy = profile(dataset)
    other_s = apply_chat_template_per_sample(dataset, chats) * num_samples
    note = f"{num_healthy / took_s:,.0f} samples/s"
    name = f"profile {num_samples} conversations"
    return Figure(name, took_s, None, "apply_chat_template alone", other_s, note=note)


def ledger_figure(folder: Path, num_samples: int) -> Figure:
    """What it costs to look for media that rows name but do not place, where every row names one that is not there."""
    dataset, _ = conversations(folder, num_samples, lambda i: {"metadata": {"source": f"train/{i}.jpg"}})
    took_s, _ = profile(dataset)
    rows, (entry,) = dataset.open(), dataset.entries
    parsed = [json.loads(line) for line in entry.paths[0].open()]
    samples = [rows.sample(i) for i in range(len(parsed))]
    looked_s = _timed(lambda: [list(names_in(row, ())) for row in parsed])
    looked_s += _timed(lambda: [rows.unplaced(i, sample) for i, sample in enumerate(samples)])
    note = f"{looked_s / took_s:.1%} of the profile"
    return Figure(
        f"  names of media looked for in {num_samples} rows", looked_s, None, "their profile", took_s, 20.0, note
    )


def again_figure(folder: Path, media: Path, num_samples: int) -> Figure:
    dataset, _ = link_files(folder, media, "video", min(num_samples, MOST_VIDEOS))
    first_s, _ = profile(dataset, folder / "cache")
    again_s, num_healthy = profile(dataset, folder / "cache")
    return Figure(f"  {num_healthy} videos once more, unchanged", again_s, None, "the first time", first_s)


def sizes_figure(path: Path) -> Figure:
    num_rows = len(read_sizes(path))
    took_s = _timed(
        lambda: [profile_sizes(read_sizes(path), shape_rules(load_family(family, {}, {}))) for family in FAMILIES]
    )
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    name = f"sizes of {num_rows} samples, {len(FAMILIES)} families"
    return Figure(name, took_s, 20.0, note=f"peak {peak_gb:.2f} GB (bound 4)")


def link_files(folder: Path, media: Path, kind: str, num_samples: int) -> tuple[DatasetRef, list[Path]]:
    """A dataset of one file per sample: the real ones of this kind, over and over."""
    copies = folder / "files"
    copies.mkdir(parents=True)
    files = []
    only_small, kind = kind == SMALL, "image" if kind == SMALL else kind
    for number, path in enumerate(sorted(p for p in media.rglob("*") if p.suffix.lower() in SUFFIXES[kind])):
        if "hostile" not in path.parts and not (only_small and not _is_small(path)):
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


def conversations(
    folder: Path, num_samples: int, more: Callable[[int], dict[str, object]] = lambda _: {}
) -> tuple[DatasetRef, list[list[dict[str, str]]]]:
    """Questions and answers of 5 to 300 words out of Python's documentation; `more` gives further keys of a row."""
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
    rows = [json.dumps({"id": str(i), "messages": chat, **more(i)}) for i, chat in enumerate(chats)]
    return _dataset(folder, rows, folder), chats


def profile(dataset: DatasetRef, cache: Path | None = None) -> tuple[float, int]:
    """(seconds, healthy samples) of the profiler in this process, its start included."""
    start = time.perf_counter()
    shapes, _ = profile_shard(dataset, _family(), 0, 1, key="bench", cache=cache)
    return time.perf_counter() - start, len(shapes)


def decode_per_sample(kind: str, files: Sequence[Path]) -> float:
    """Seconds per file of decoding and of the processor, whose construction does not count."""
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    family = _family()
    images, sounds = Qwen2VLImageProcessorPil(max_pixels=family.media["max_pixels"]), WhisperFeatureExtractor(128)

    def decode(path: Path) -> None:
        if kind == "video":
            _decode_frames(family, path)
        elif kind == "audio":
            sounds(decode_audio(path, 16_000), sampling_rate=16_000, padding=False, truncation=False)
        else:
            images(images=decode_image(path), return_tensors="np")

    chosen = list(islice(cycle(files), max(NUM_DECODED[kind], len(files))))
    return _timed(lambda: [decode(path) for path in chosen]) / len(chosen)


def _decode_frames(family: Any, path: Path) -> None:
    h = read_header("video", path)
    frames = decode_video(path, family.frame_indices(h.num_frames, h.duration_s))
    item = h.item("", family.place(h))
    family.array_of(item, [resize(frames, *family.frame_sizes_px(item))])


def apply_chat_template_per_sample(dataset: DatasetRef, chats: Sequence[list[dict[str, str]]]) -> float:
    """Seconds per conversation as a training script does it: template and tokenizer, one at a time."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(dataset.tokenizer), chat_template=BUILT_IN["chatml"])
    tokenizer.apply_chat_template(chats[0])
    chosen = chats[:NUM_ONE_BY_ONE]
    return _timed(lambda: [tokenizer.apply_chat_template(chat) for chat in chosen]) / len(chosen)


def shape_rules(rules: MediaRules, max_llm_tokens: int = 8192) -> ShapeRules:
    """Those of a family with a tokenizer that has its marks; what is too long is shrunk."""
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as name:
        path = Path(name) / "tokenizer.json"
        _write_tokenizer(path, rules)
        return ShapeRules("bench", rules, ChatTokenizer(path, rules), max_llm_tokens, ("shrink",))


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


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
