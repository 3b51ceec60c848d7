"""Epochs of texts and images under Trainer's own orders and `BalancedTrainer`, padded and packed, by two processes.

Counted is processor time, the least of all rounds of each rank and step, loading included: a step takes what its slower
rank takes, so other work on the machine does not matter. What ranks wait for messages is not counted.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dflop.sampler.hf import BalancedTrainer
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.dealt import Sample, batch_of, draw, make_model
from tests.bench.figures import conclude
from tests.bench.markdown import ratio, table

NUM_SAMPLES, PACKED = 64, "packed"
DATA = {
    "short": "texts of 16 to 64 tokens",
    "long": "texts with a long tail",
    "images": "single images with texts",
    "tail": "images, several images, videos and texts, a quarter each",
}
ORDERS = {
    "random": "random, padded (the default)",
    "group_by_length": "`group_by_length`, padded",
    "batch_rebalance": "`batch_rebalance`, padded",
    "balanced": "`BalancedTrainer`, padded",
    PACKED: '`BalancedTrainer(packing="exact")`',
}
PADS = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded to the longest."""
    found, longest = {}, max(len(s["input_ids"]) for s in samples)
    for name in dict.fromkeys(name for s in samples for name in s):
        parts = [s[name] for s in samples if name in s]
        if name in PADS:
            parts = [torch.nn.functional.pad(of, (0, longest - len(of)), value=PADS[name])[None] for of in parts]
        found[name] = torch.cat(parts)
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    return {**found, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


class Timed(TrainerCallback):
    """Processor seconds from a step's end to the next one's."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.process_time())


def train(name: str, dataset: list[Any], folder: Path) -> list[float]:
    """Processor seconds of the steps of an epoch."""
    is_ours, timed = name in ("balanced", PACKED), Timed()
    args = TrainingArguments(
        str(folder), use_cpu=True, num_train_epochs=1, gradient_accumulation_steps=2, per_device_train_batch_size=4,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, data_seed=0,
        ddp_find_unused_parameters=True, remove_unused_columns=False, learning_rate=0.0,
        train_sampling_strategy="random" if is_ours else name,
    )  # fmt: skip
    given: dict[str, Any] = {"packing": "exact"} if name == PACKED else {}
    if is_ours:
        given["count"] = lambda batch: (batch["labels"][:, 1:] != -100).sum()
    kind = BalancedTrainer if is_ours else Trainer
    trainer = kind(make_model(llm_layers=6), args, collate, dataset, callbacks=[timed], **given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return np.diff(timed.ends).tolist()


def samples_of(data: str, sizes: Path | None) -> list[Sample]:
    rng = np.random.default_rng(1)
    if data == "short":
        return [([], [], int(n)) for n in rng.integers(16, 65, NUM_SAMPLES)]
    if data == "long":
        return [([], [], int(n)) for n in np.clip(rng.lognormal(4.5, 1.2, NUM_SAMPLES), 8, 1500)]
    return draw(data, sizes, NUM_SAMPLES)


def worker(rank: int, folder: Path, sizes: Path | None, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By data and order, least processor seconds of this rank's steps; `num_tokens` by data."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    seconds: dict[str, dict[str, list[float]]] = {}
    for data in DATA:
        rng = np.random.default_rng(0)
        batches = [batch_of([sample], rng) for sample in samples_of(data, sizes)]
        # One dimension: Trainer takes `len(input_ids)` for a sample's length, whatever else it has.
        dataset = [{name: of[0] if name in PADS else of for name, of in batch.items()} for batch in batches]
        found: dict[str, list[list[float]]] = {name: [] for name in ORDERS}
        for number in range(rounds):
            turn = number % len(ORDERS)
            for name in [*ORDERS][turn:] + [*ORDERS][:turn]:
                found[name].append(train(name, dataset, folder))
        seconds[data] = {name: np.min(of, axis=0).tolist() for name, of in found.items()}
        seconds[data]["num_tokens"] = [float(sum(len(s["input_ids"]) for s in dataset))]
    return seconds


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`packed`: tokens per second of an epoch in the default order, and of the others over it."""
    rows = []
    for data, name in DATA.items():
        of = content["data"][data]
        ratios = [ratio(of["seconds"]["random"] / of["seconds"][key]) for key in [*ORDERS][1:]]
        rows.append((name, f"{of['num_tokens'] / of['seconds']['random']:,.0f}", *ratios))
    default, *others = ORDERS.values()
    return {"packed": table(("data", f"{default}: tokens per processor second", *others), rows)}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated without")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    become_a_job("tests.bench.packing", OMP_NUM_THREADS="1")
    keep_to(2)
    ranks = in_ranks(worker, 2, given.sizes, given.rounds)
    by_data = {
        data: {
            "seconds": {name: float(np.max([of[data][name] for of in ranks], axis=0).sum()) for name in ORDERS},
            "num_tokens": ranks[0][data]["num_tokens"][0],
        }
        for data in DATA
    }
    found = {"data": by_data, "num_rounds": given.rounds}
    print(tables(found)["packed"])
    conclude(found, [], given.json, "transformers", "torch")
