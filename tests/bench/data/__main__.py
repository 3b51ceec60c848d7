"""What profiling data costs here: `python -m tests.bench.data [--media FOLDER] [--sizes FILE] [--json FILE]`.

Every figure is one process on one core beside the way that decodes: the Hugging Face processors on the same files in
the same run, timed on fewer samples and scaled. Files are warm; each of the samples is a file of its own (hard links),
so nothing is remembered between them. FOLDER holds real images, videos and sounds in any arrangement (without it, the
demo dataset's, which are tiny: the bounds are for media as they are); FILE is a table of sizes, see
`dflop/data/sizes.py`.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.command import keep_to, options
from tests.bench.data import cases
from tests.bench.figures import Figure, finish, line

NUM_SAMPLES = 20_000


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--media", type=Path, help="folder with real media (default: those of the demo dataset)")
    parser.add_argument("--sizes", type=Path, help="Parquet table of sizes")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = "1"
    keep_to(1)
    folder = Path(tempfile.mkdtemp(prefix="dflop-bench-"))
    figures: list[Figure] = []
    try:
        media = args.media or cases.demo_media(folder / "demo")
        steps: list[Callable[[], Figure]] = [
            *(
                lambda kind=kind: media_figure(
                    folder / kind.replace(" ", "-"), media, kind, args.samples, args.media is not None
                )
                for kind in cases.RATIOS
            ),
            lambda: text_figure(folder / "text", args.samples),
            lambda: again_figure(folder / "again", media, args.samples),
        ]
        if args.sizes:
            steps.append(lambda: sizes_figure(args.sizes))
        for step in steps:
            figures.append(step())
            print(line(figures[-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finish(figures, args.json, "pillow", "av", "tokenizers", "transformers", "polars")


def media_figure(folder: Path, media: Path, kind: str, num_samples: int, is_bound: bool) -> Figure:
    num_samples = min(num_samples, cases.MOST[kind])
    dataset, files = cases.link_files(folder, media, kind, num_samples)
    took_s, num_healthy = cases.profile(dataset)
    decoded_s = cases.decode_per_sample(kind, files) * num_samples
    note = f"{num_healthy / took_s:,.0f} samples/s, {num_samples / decoded_s:,.1f} decoded"
    name = f"profile {num_samples} samples of one {kind}"
    return Figure(name, took_s, None, cases.DECODERS[kind], decoded_s, cases.RATIOS[kind] if is_bound else None, note)


def text_figure(folder: Path, num_samples: int) -> Figure:
    dataset, texts = cases.conversations(folder, num_samples)
    took_s, num_healthy = cases.profile(dataset)
    one_by_one_s = cases.apply_chat_template_per_sample(dataset, texts) * num_samples
    note = f"{num_healthy / took_s:,.0f} samples/s"
    return Figure(
        f"profile {num_samples} conversations", took_s, None, "apply_chat_template alone", one_by_one_s, None, note
    )


def again_figure(folder: Path, media: Path, num_samples: int) -> Figure:
    dataset, _ = cases.link_files(folder, media, "video", min(num_samples, cases.MOST["video"]))
    first_s, _ = cases.profile(dataset, folder / "cache")
    again_s, num_healthy = cases.profile(dataset, folder / "cache")
    return Figure(f"  {num_healthy} videos once more, unchanged", again_s, None, "the first time", first_s)


def sizes_figure(path: Path) -> Figure:
    print(f"tables of sizes, {', '.join(cases.FAMILIES)} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    num_rows = sum(cases.profile_sizes_for(path, family) for family in cases.FAMILIES)
    took_s = time.perf_counter() - start
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    one_by_one_s = sum(cases.place_row_by_row(path, family) for family in cases.FAMILIES)
    name = f"sizes of {num_rows // len(cases.FAMILIES)} samples, {len(cases.FAMILIES)} families"
    return Figure(name, took_s, 20.0, "row by row", one_by_one_s, None, f"peak {peak_gb:.2f} GB (bound 4)")


if __name__ == "__main__":
    main()
