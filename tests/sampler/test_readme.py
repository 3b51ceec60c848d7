"""The examples of the page on the sampler, run as they stand on made-up data; the README shows the first of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.sampler.tiny import collate, make_dataset, make_model, num_supervised

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sampler.md"


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
    return {
        "dataset": dataset,
        "lengths": [len(s["input_ids"]) for s in dataset],
        "num_supervised": [num_supervised(s) for s in dataset],
        "collate": collate,
        "fetch": lambda indices: collate([dataset[i] for i in indices]),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "DataLoader": DataLoader,
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "arguments": {
            "output_dir": str(tmp_path), "use_cpu": True, "num_train_epochs": 1, "report_to": [], "save_strategy": "no",
            "disable_tqdm": True,
        },
        "pl": pl,
        "MyModule": MyModule,
        "options": {
            "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False,
        },
    }  # fmt: skip


def test_the_readme_shows_the_first_example():
    assert blocks(ROOT / "README.md") == blocks()[:1]


def test_the_page_has_an_example_for_every_loop():
    text = "\n".join(blocks())
    assert len(blocks()) >= 4
    for word in ("sample_costs(", "sampler.steps(loader)", "(Trainer)", "pl.Trainer("):
        assert word in text


def test_every_example_trains(names):
    first, *loops = blocks()
    exec(first, names)
    model = names["model"]
    for loop in loops:
        before = model.lm_head.weight.detach().clone()
        exec(loop, names)
        assert not torch.equal(model.lm_head.weight, before)


def test_the_check_on_the_page_runs(names):
    calls = re.findall(r"`(check_loss_scaling\(.*?\))`", PAGE.read_text())
    exec(blocks()[0], names)
    assert eval(calls[0], names).error_frac < 1e-5
