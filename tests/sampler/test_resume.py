"""Resuming as trainers do it by themselves: what they skip, and where they call `set_epoch`; the page's examples run.

Trainers are imported in functions: that takes seconds, of every collection of tests.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dflop.sampler import BalancedBatchSampler
from tests.sampler.tiny import collate, costs_of, make_dataset, make_model, num_supervised, remembering_module

DATASET = make_dataset()
STEPS_PER_EPOCH = 3
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sampler.md"


def train(folder: Path, resume: str | None = None, **given) -> Any:
    """Remembers the batches it trained on."""
    from transformers import TrainingArguments

    from dflop.sampler.hf import BalancedTrainer

    class Kept(BalancedTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            self.trained = [*getattr(self, "trained", []), inputs["input_ids"].sum().item()]
            return super().training_step(model, inputs, *args, **kwargs)

    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=2, gradient_accumulation_steps=2, report_to=[],
        save_strategy="steps", save_steps=1, logging_strategy="no", disable_tqdm=True, eval_strategy="steps",
        eval_steps=2, **given,
    )  # fmt: skip
    trainer = Kept(make_model(), args, collate, train_dataset=DATASET, eval_dataset=DATASET[:8])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


@pytest.mark.parametrize(("step", "ignores"), [(3, False), (4, False), (2, True)])
def test_hugging_face_goes_on_within_an_epoch_and_at_its_end(step, ignores, whole, tmp_path):
    folder, uninterrupted = whole
    assert uninterrupted.state.global_step == 2 * STEPS_PER_EPOCH
    resumed = train(tmp_path, str(folder / f"checkpoint-{step}"), ignore_data_skip=ignores)
    assert resumed.trained == uninterrupted.trained[2 * step :]
    assert resumed.state.global_step == uninterrupted.state.global_step
    assert torch.equal(resumed.model.lm_head.weight, uninterrupted.model.lm_head.weight)


def make() -> BalancedBatchSampler:
    return BalancedBatchSampler(costs_of(DATASET), 16, num_microbatches=2, rank=0, num_replicas=1)


def fit(sampler: BalancedBatchSampler, folder: Path, resume: Path | None = None) -> list[list[int]]:
    """Trains nothing, and returns what it was given."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    module = remembering_module()
    loader = DataLoader(range(len(DATASET)), batch_sampler=sampler, collate_fn=list)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=2, use_distributed_sampler=False,
        callbacks=[keep], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    return module.seen


@pytest.fixture(scope="module")
def lightning(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("lightning")
    stale = make()
    stale.set_epoch(5)  # Lightning finds `set_epoch` and begins where it wants to
    return folder, fit(stale, folder)


@pytest.mark.parametrize("step", [3, 4])
def test_lightning_goes_on_where_the_sampler_is_told_to(step, lightning, tmp_path):
    folder, seen = lightning
    whole, sampler = make(), make()
    assert seen == [*list(whole), *list(whole)], "the epochs that it says"
    sampler.resume(step)
    assert fit(sampler, tmp_path, folder / f"step={step}.ckpt") == seen[2 * step :]


def blocks(page: Path = PAGE) -> list[str]:
    """Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture
def names(tmp_path) -> dict[str, Any]:
    """What the page leaves to its reader."""
    import pytorch_lightning as pl
    from transformers import Trainer, TrainingArguments

    class MyModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    dataset, model = make_dataset(), make_model()
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "num_train_epochs": 1, "report_to": [],
                 "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False}  # fmt: skip
    return {
        "dataset": dataset, "lengths": [len(s["input_ids"]) for s in dataset],
        "num_supervised": [num_supervised(s) for s in dataset], "collate": collate,
        "fetch": lambda indices: collate([dataset[i] for i in indices]), "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "DataLoader": DataLoader, "Trainer": Trainer,
        "TrainingArguments": TrainingArguments, "arguments": arguments, "pl": pl, "MyModule": MyModule,
        "options": options,
    }  # fmt: skip


def test_the_readme_shows_the_first_example():
    assert blocks(ROOT / "README.md") == blocks()[:1]


def test_every_example_and_the_check_on_the_page_run(names):
    assert len(blocks()) >= 3, "an example for every kind of loop"
    model = names["model"]
    for block in blocks():
        before = model.lm_head.weight.detach().clone()
        exec(block, names)
        assert not torch.equal(model.lm_head.weight, before)
    calls = re.findall(r"`(check_loss_scaling\(.*?\))`", PAGE.read_text())
    assert eval(calls[0], names).error_frac < 1e-5
