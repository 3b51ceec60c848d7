"""BalancedTrainer packs samples with images: a step's gradient is that of its samples one at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from dflop.balance import balanced_encoder
from dflop.errors import ConfigError
from dflop.sampler.hf import BalancedTrainer
from tests.balance.ranks import gradients
from tests.balance.test_packing import collate, of_one_at_a_time
from tests.balance.tiny import make_model, sample
from tests.train.ranks import run_ranks

NUM_SAMPLES = 8
TRL = Path(sys.prefix) / "clients" / "trl"


def samples_of(kind, model):
    return [sample(kind, model, n, [1] * (n % 3), [2] * (n % 2), num_text=6 + 9 * n) for n in range(NUM_SAMPLES)]


def without_length(rows):
    return collate([{name: value for name, value in row.items() if name != "length"} for row in rows])


class Keep(TrainerCallback):
    """Keeps the gradients of every step."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        self.found.append(gradients(model))


def train(kind, folder, num_ranks=1):
    """(gradients of a step, the trainer); with several ranks their encoders' items are dealt out, too."""
    model, keep = make_model(kind), Keep()
    dataset = [{**s, "length": s["input_ids"].shape[1]} for s in samples_of(kind, model)]
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=1, learning_rate=0.0, gradient_accumulation_steps=2, max_grad_norm=0.0,
        per_device_train_batch_size=NUM_SAMPLES // 2 // num_ranks, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, data_seed=0,
    )  # fmt: skip
    trainer = BalancedTrainer(model, arguments, without_length, dataset, packing="exact", callbacks=[keep])
    with balanced_encoder(model, min_gain=1.0):
        trainer.train()
    return keep.found[0], trainer


def check(kind, found):
    expected = of_one_at_a_time(kind, samples_of(kind, make_model(kind)))
    for name, exact in expected.items():
        assert float((found[name] - exact).norm()) <= 1e-5 * float(exact.norm()) + 1e-9, name


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_gradients_of_packed_microbatches_are_exact(kind, tmp_path):
    found, trainer = train(kind, tmp_path)
    assert not trainer.balanced_sampler.planner.padded
    check(kind, found)


def one_of_two(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    return train("qwen3_vl", folder, num_ranks=2)[0]


def test_two_processes_pack_and_deal_their_encoders_items(tmp_path):
    for found in run_ranks(one_of_two, 2, tmp_path):
        check("qwen3_vl", found)


@pytest.mark.skipif(not TRL.is_dir(), reason="needs TRL: make references")
def test_trl_packs_exactly_without_a_second_forward_pass(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TRL), str(TRL.parent / "datasets"), os.getcwd()])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sampler.trl_trainer", str(tmp_path)], env=environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5
    assert "extra forward pass" not in done.stderr


def test_another_packing_is_refused():
    with pytest.raises(ConfigError, match="packing is `rough`"):
        BalancedTrainer(torch.nn.Linear(1, 1), packing="rough")
