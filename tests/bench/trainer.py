"""An epoch under Hugging Face's Trainer by two processes, a core each: its own orders and `BalancedTrainer`, in turn.

A small Llama on texts whose lengths have a tail, padded. Before, some steps at learning rate 0: losses and gradient
norms of `BalancedTrainer` against Trainer's own order of the same global batches.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from dflop.records.speedup import speedup
from dflop.sampler import BalancedBatchSampler
from dflop.sampler.hf import BalancedTrainer
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.markdown import ratio, span, table
from tests.sampler.tiny import collate

VOCAB, OURS = 512, "BalancedTrainer"
ORDERS = {
    "random": "random (the default)",
    "group_by_length": "`group_by_length`",
    "batch_rebalance": "`batch_rebalance`",
}


def train(name: str, dataset: list[Any], folder: Path, **given: Any) -> tuple[float, np.ndarray]:
    """(seconds of an epoch, `[steps, 2]` losses and gradient norms)."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048)  # fmt: skip
    args = TrainingArguments(
        str(folder), use_cpu=True, num_train_epochs=1, gradient_accumulation_steps=2, per_device_train_batch_size=4,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, data_seed=0, dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
        train_sampling_strategy="random" if name == OURS else name, **given,
    )  # fmt: skip
    kind = BalancedTrainer if name == OURS else Trainer
    trainer = kind(LlamaForCausalLM(config), args, collate, train_dataset=dataset)
    trainer.remove_callback(PrinterCallback)
    seconds = trainer.train().metrics["train_runtime"]
    return seconds, np.array([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])


def worker(rank: int, folder: Path, num_rounds: int) -> tuple[list[dict[str, float]], float]:
    """(`[round][order]` seconds of an epoch, largest relative difference)."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.6, 0.9, 256), 16, 1024).astype(int).tolist()
    dataset = [{"input_ids": ids, "labels": ids} for ids in (torch.tensor(rng.integers(1, VOCAB, n)) for n in lengths)]
    sampler = BalancedBatchSampler(lengths, 16, num_replicas=1, rank=0, drop_last=True)
    in_order = [dataset[i] for batch in sampler for i in batch]  # the global batches that BalancedTrainer deals out
    cases = ((OURS, dataset), ("sequential", in_order))
    (_, ours), (_, own) = (train(*case, folder, learning_rate=0.0, max_steps=4) for case in cases)
    names, rounds = [*ORDERS, OURS], []
    for number in range(num_rounds):  # none of them always first
        turn = number % len(names)
        rounds.append({name: train(name, dataset, folder)[0] for name in names[turn:] + names[:turn]})
    return rounds, float(np.abs(ours / own - 1).max())


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`trainer`: step times over ours, round by round."""
    rows, num_rounds = [], len(content["rounds"])
    for order, name in ORDERS.items():
        theirs, ours = ([of[key] for of in content["rounds"]] for key in (order, OURS))
        found = speedup(theirs, ours)
        noise = "" if found.is_conclusive else ": no difference beyond noise"
        rows.append((name, f"{ratio(found.mean)} ({span((found.low, found.high))}){noise}"))
    head = (
        "Trainer's own order",
        f"step time over that of `{OURS}`, mean of {num_rounds} rounds and its 95 % interval",
    )
    return {"trainer": table(head, rows)}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    become_a_job("tests.bench.trainer", OMP_NUM_THREADS="1")
    keep_to(2)
    rounds, error = in_ranks(worker, 2, given.rounds)[0]
    found = {"rounds": rounds, "error": error}
    print(tables(found)["trainer"])
    print(f"largest relative difference of losses and gradient norms: {error:.1e}")
    conclude(found, [("losses and norms", error <= 1e-5)], given.json, "transformers", "torch")
