"""One process of two under Hugging Face's Trainer: the same global batches under every policy in turn, each step timed.

Run as `python -m tests.bench.schedule.trainer_rank FOLDER` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCAB = 2048


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_dataset(lengths: list[int], supervised: list[int]) -> list[dict[str, list[int]]]:
    """Random tokens; the last `supervised` of each text carry loss."""
    generator = torch.Generator().manual_seed(0)
    dataset = []
    for length, scored in zip(lengths, supervised, strict=True):
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        dataset.append({"input_ids": ids, "labels": [-100] * (length - scored) + ids[length - scored :]})
    return dataset


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Samples one after the other, without padding."""
    batch: dict[str, torch.Tensor] = DataCollatorWithFlattening()(samples)
    return batch


class Stopwatch(TrainerCallback):
    """Wall and compute seconds of every step, and the gradients of the first of each policy."""

    def __init__(self, num_kept: int) -> None:
        self.steps: list[tuple[float, float]] = []
        self.gradients: list[torch.Tensor] = []
        self._num_kept = num_kept

    def on_step_begin(self, args, state, control, **rest) -> None:
        dist.barrier()
        self._began = time.perf_counter(), time.thread_time()

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest) -> None:
        # The steps of the first global batch come first, one per policy.
        self.steps.append((time.perf_counter() - self._began[0], time.thread_time() - self._began[1]))
        if len(self.gradients) < self._num_kept:
            self.gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))


class FixedTrainer(Trainer):
    """The usual way in for a batch sampler of one's own."""

    batches: list[list[int]]

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = json.loads((folder / "job.json").read_text())
    batches = [microbatch for step in job["steps"] for microbatch in step[rank]]
    args = TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, max_steps=len(job["steps"]), learning_rate=0.0, optim="sgd",
        gradient_accumulation_steps=job["num_microbatches"], max_grad_norm=0.0, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    watch = Stopwatch(job["num_policies"])
    dataset = make_dataset(job["lengths"], job["supervised"])
    trainer = FixedTrainer(make_model(), args, collate, train_dataset=dataset, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    trainer.batches = batches
    trainer.train()
    first = watch.gradients[0]
    errors = [float((g - first).norm() / first.norm()) for g in watch.gradients[1:]]
    found = {"steps": watch.steps, "gradient_error": max(errors)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
