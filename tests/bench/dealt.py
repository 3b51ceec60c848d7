"""What dealing encoder items over ranks saves, and costs: `python -m tests.bench.dealt [--sizes TABLE]`.

Two and four processes over gloo train a small Qwen2.5-VL, samples dealt in turn, with the encoder's items dealt and
without, by turns. Counted is the processor time of a rank's forward and backward pass, messages and copies included,
the least of all rounds: a step takes what its slowest rank takes. What ranks wait is not counted, nor is a network.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.balance import balanced_encoder
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.markdown import ratio, table

IMAGE, VIDEO, VOCAB, SIDE_PX, PER_RANK, NUM_STEPS = 3, 4, 256, 28, 4, 4
SHRINK, MAX_PATCHES, MAX_FRAMES = 0.4, 1024, 16
DATA = {
    "tail": "images, several images, videos and texts, a quarter each",
    "images": "single images",
    "one size": "images of one size",
}
Sample = tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], int]
"""(grids of images, of videos, tokens of text)."""


def grid(width: float, height: float, frames: int = 1) -> tuple[int, int, int]:
    """Patches of an image or of a video's frames, shrunk in proportion: a test machine has no GPU."""
    scale = SHRINK * min(1.0, (MAX_PATCHES * 14**2 / (width * height * SHRINK**2)) ** 0.5)
    sides = (2 * max(1, round(px * scale / SIDE_PX)) for px in (height, width))
    return (frames, *sides)  # type: ignore[return-value]  # two sides


def draw(data: str, sizes: Path | None, number: int) -> list[Sample]:
    """Samples of real sizes where there is a table of them."""
    rng = np.random.default_rng(0)
    if data == "one size":
        return [([grid(448, 448)], [], 64) for _ in range(number)]
    if sizes is None:
        px = rng.lognormal(13.0, 1.0, number) ** 0.5
        return [([grid(p, p)] * int(rng.integers(0, 3)), [], int(rng.integers(16, 256))) for p in px]
    from pyarrow import parquet

    names = ("single_image",) if data == "images" else ("single_image", "multi_image", "video", "text")
    columns = ["group", "image_w", "image_h", "video_frames", "video_w", "video_h", "text_tokens"]
    rows = parquet.read_table(sizes, columns=columns)
    groups, found = np.array(rows["group"].to_pylist()), list[Sample]()
    for k in range(number):
        row = rows.slice(int(rng.choice(np.flatnonzero(groups == names[k % len(names)]))), 1).to_pylist()[0]
        images = [grid(w, h) for w, h in zip(row["image_w"], row["image_h"], strict=True)]
        videos = [
            grid(w / 2, h / 2, max(1, min(MAX_FRAMES, int(n)) // 2))
            for w, h, n in zip(row["video_w"] or [], row["video_h"] or [], row["video_frames"] or [], strict=True)
            if w and h and n
        ]
        found.append((images, videos, int(np.clip(row["text_tokens"] or 16, 8, 512))))
    return [found[i] for i in rng.permutation(number)]


def batch_of(samples: list[Sample], rng: np.random.Generator) -> dict[str, Any]:
    """Samples behind one another in a row: the LLM is no part of the question."""
    ids: list[int] = []
    for images, videos, text in samples:
        for pad, grids in ((IMAGE, images), (VIDEO, videos)):
            ids += [token for t, h, w in grids for token in (5, *[pad] * (t * h * w // 4), 6)]
        ids += rng.integers(10, VOCAB, text).tolist()
    found: dict[str, Any] = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])}
    found["mm_token_type_ids"] = (found["input_ids"] == IMAGE).long() + 2 * (found["input_ids"] == VIDEO).long()
    for place, (grids, values) in enumerate(
        (("image_grid_thw", "pixel_values"), ("video_grid_thw", "pixel_values_videos"))
    ):
        of = [grid for sample in samples for grid in sample[place]]
        if of:
            found[grids] = torch.tensor(of)
            found[values] = torch.tensor(rng.standard_normal((sum(t * h * w for t, h, w in of), 1176))).float()
    return found


def make_model(llm_layers: int = 2) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=5, vision_end_token_id=6,
        vision_config={"depth": 4, "hidden_size": 128, "intermediate_size": 352, "num_heads": 4, "out_hidden_size": 128,
                       "fullatt_block_indexes": [1, 3]},
        text_config={"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": llm_layers,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).train()


def worker(rank: int, folder: Path, sizes: Path | None, rounds: int) -> dict[str, tuple[float, np.ndarray]]:
    """By data: (gain by the costs, `[way][step]` least processor seconds of this rank), without dealing first."""
    torch.set_num_threads(1)
    model, found = make_model(), {}
    world = dist.get_world_size()
    for data in DATA:
        samples, rng = draw(data, sizes, world * PER_RANK * NUM_STEPS), np.random.default_rng(rank)
        own = [samples[k * PER_RANK :][:PER_RANK] for k in range(rank, world * NUM_STEPS, world)]
        batches, gain = [batch_of(of, rng) for of in own], 1.0
        seconds = np.full((2, NUM_STEPS), np.inf)
        for _ in range(rounds):
            for way in range(2):
                with balanced_encoder(model) if way else contextlib.nullcontext() as dealer:
                    for step, batch in enumerate(batches):
                        dist.barrier()
                        start = time.process_time()
                        model(**batch, use_cache=False).loss.backward()
                        seconds[way, step] = min(seconds[way, step], time.process_time() - start)
                        model.zero_grad()
                    gain = dealer.gain if dealer is not None else gain
        found[data] = gain, seconds
    return found


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`dealt`: what steps take without dealing, over what they take with it."""
    rows = [
        (DATA[row["data"]], str(row["num_ranks"]), ratio(row["gain"]), ratio(row["speedup"]), f"{row['overhead']:.1%}")
        for row in content["rows"]
    ]
    head = (
        "media",
        "ranks",
        "encoders alone, by the costs",
        "whole steps, measured",
        "processor time of all ranks, more",
    )
    return {"dealt": table(head, rows)}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated without")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    become_a_job("tests.bench.dealt", OMP_NUM_THREADS="1")
    keep_to(2)
    rows = []
    for num_ranks in (2, 4):
        ranks = in_ranks(worker, num_ranks, given.sizes, given.rounds)
        for data in DATA:
            seconds = np.array([of[data][1] for of in ranks])  # [rank, way, step]
            without, dealt = seconds.max(axis=0).sum(axis=1).tolist()
            more = seconds[:, 1].sum() / seconds[:, 0].sum() - 1
            rows.append({"data": data, "num_ranks": num_ranks, "gain": ranks[0][data][0], "speedup": without / dealt,
                         "overhead": float(more)})  # fmt: skip
    found = {"rows": rows, "samples": "drawn from a table of real sizes" if given.sizes else "generated"}
    print(tables(found)["dealt"])
    conclude(found, [], given.json, "transformers", "torch")
