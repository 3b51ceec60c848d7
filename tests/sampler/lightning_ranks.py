"""The Lightning example of docs/sampler.md as a program for any launcher: `lightning_ranks.py FOLDER [NUM_NODES]`.

Sampler and loader are made before anybody knows of ranks. Every rank leaves the samples that it trained.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from dflop.sampler import BalancedBatchSampler, sample_costs

LENGTHS = [(7 * i) % 41 + 3 for i in range(32)]
NUM_RANKS = 2

sampler = BalancedBatchSampler(sample_costs(LENGTHS), global_batch_size=8, num_microbatches=2)
loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=torch.tensor)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return (self.weight * batch.float().mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def main(folder: str, num_nodes: str = "1") -> None:
    warnings.simplefilter("ignore")
    module = Module()
    pl.Trainer(
        accelerator="cpu", devices=NUM_RANKS // int(num_nodes), num_nodes=int(num_nodes), strategy="ddp", max_epochs=1,
        accumulate_grad_batches=2, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    (Path(folder) / f"seen-{module.global_rank}.json").write_text(json.dumps(module.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
