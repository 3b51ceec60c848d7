"""Two ranks: a few optimizer steps under each trainer, at learning rate 0, and the gradients they ended with.

Run as `python -m tests.sampler.trainers FOLDER` with MASTER_ADDR and MASTER_PORT set. The ranks are forked once all
trainers are imported, which takes longer than all that is trained.
"""

import contextlib
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dflop.errors import ConfigError
from dflop.sampler import BalancedBatchSampler
from tests.sampler.tiny import Bare, collate, costs_of, flat_gradient, make_dataset, make_model, num_supervised

NUM_STEPS, NUM_MICROBATCHES, BATCH = 2, 2, 16
NUM_RANKS = 2
DATASET = make_dataset()


class Seen(list):
    """The dataset, which remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__(DATASET)
        self.drawn: list[int] = []

    def __getitem__(self, i):
        self.drawn.append(int(i))
        return super().__getitem__(i)


def make_sampler(**given) -> BalancedBatchSampler:
    return BalancedBatchSampler(costs_of(DATASET), BATCH, **{"num_microbatches": NUM_MICROBATCHES, **given})


EARLY = make_sampler()


def plain_ddp(seen: Seen) -> list[Tensor]:
    """A sampler that was made before anybody knew of two ranks."""
    model = DistributedDataParallel(make_model())
    return loop(model, EARLY, seen, model.no_sync)


def varying_count(seen: Seen) -> list[Tensor]:
    """As many microbatches as the cap takes, and labels that nobody counted before."""
    model = DistributedDataParallel(make_model())
    sampler = BalancedBatchSampler([len(s["input_ids"]) for s in DATASET], BATCH, max_tokens=90)
    return loop(model, sampler, seen, model.no_sync, count=num_supervised)


def fsdp2(seen: Seen) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, make_sampler(sync="microbatch"), seen, contextlib.nullcontext)


def accelerate_loop(seen: Seen) -> list[Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())  # not the loader: its batches are this rank's already
    return loop(model, make_sampler(), seen, lambda: accelerator.no_sync(model), accelerator.backward)


def loop(model, sampler, seen: Seen, no_sync: Callable, backward=torch.Tensor.backward, count=None) -> list[Tensor]:
    """Scales of the samples' own counts, or of what `count` finds in the batches."""
    loader, gradients = DataLoader(seen, batch_sampler=sampler, collate_fn=collate), []
    for step in sampler.steps(loader, until=NUM_STEPS):
        batches = list(step)
        scales = step.loss_scales(**({"counts": [count(b) for b in batches]} if count else {}))
        for k, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            with no_sync() if k < len(step) - 1 else contextlib.nullcontext():
                backward(model(**batch).loss * scale)
        gradients.append(flat_gradient(model))
        model.zero_grad()
    return gradients


def hugging_face(seen: Seen, model: torch.nn.Module | None = None, strategy="random", **given) -> list[Tensor]:
    from transformers import TrainerCallback, TrainingArguments

    from dflop.sampler.hf import BalancedTrainer

    gradients = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
            gradients.append(flat_gradient(model))

    args = TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / "out"), use_cpu=True, max_steps=NUM_STEPS, learning_rate=0.0,
        gradient_accumulation_steps=NUM_MICROBATCHES, max_grad_norm=0.0, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, data_seed=0, train_sampling_strategy=strategy,
        per_device_train_batch_size=BATCH // (NUM_RANKS * NUM_MICROBATCHES),
    )  # fmt: skip
    model = make_model() if model is None else model
    given = {"train_dataset": seen, "costs": costs_of(DATASET), "callbacks": [Keep()], **given}
    BalancedTrainer(model, args, collate, **given).train()
    return gradients


def no_count(seen: Seen) -> list[Tensor]:
    return hugging_face(seen, model=Bare(), count=num_supervised)


def packed(seen: Seen) -> list[Tensor]:
    return hugging_face(seen, packing="exact")


def lightning(seen: Seen) -> list[Tensor]:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    sampler, gradients = make_sampler(), []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch, batch_idx):
            scale = sampler.step(self.global_step).loss_scales()[batch_idx % NUM_MICROBATCHES]
            return self.net(**batch).loss * scale * NUM_MICROBATCHES  # Lightning divides by it

        def on_before_optimizer_step(self, optimizer):
            gradients.append(flat_gradient(self))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=DDPStrategy(),
        max_steps=NUM_STEPS, accumulate_grad_batches=NUM_MICROBATCHES, use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), DataLoader(seen, batch_sampler=sampler, collate_fn=collate))  # fmt: skip
    return gradients


def rest_of_an_epoch(seen: Seen) -> list[Tensor]:
    """A second step of one sample: the other rank repeats it, and must not count."""
    del seen[BATCH + 1 :]
    return hugging_face(seen, costs=costs_of(seen))


def rest_packed(seen: Seen) -> list[Tensor]:
    del seen[BATCH + 1 :]
    return hugging_face(seen, costs=costs_of(seen), packing="exact")


def rest_without_count(seen: Seen) -> list[Tensor]:
    del seen[BATCH + 1 :]
    return hugging_face(seen, costs=costs_of(seen), model=Bare(), count=num_supervised)


def sequential(seen: Seen) -> list[Tensor]:
    """The trainer's own order."""
    return hugging_face(seen, strategy="sequential")


RESTS = {f.__name__: f for f in (rest_of_an_epoch, rest_packed, rest_without_count)}
CASES = {
    f.__name__: f for f in (plain_ddp, varying_count, fsdp2, accelerate_loop, lightning, hugging_face, no_count, packed)
}


def refusal() -> str:
    """What a rank is told whose costs are not those of the others."""
    try:
        BalancedBatchSampler([5 + dist.get_rank()] * 40, BATCH)
    except ConfigError as error:
        return str(error)
    return ""


def run_rank(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    (folder / f"refusal-{rank}").write_text(refusal())
    for name, case in {**CASES, **RESTS, "sequential": sequential}.items():
        seen = Seen()
        gradients = case(seen)
        torch.save((gradients, seen.drawn), folder / f"{name}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for trainer in ("accelerate", "pytorch_lightning", "transformers.trainer"):
        importlib.import_module(trainer)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, Path(folder))) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
