"""BalancedTrainer packs samples with images: a step's gradient is that of its samples one at a time."""

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from dflop.errors import ConfigError
from dflop.sampler.hf import BalancedTrainer
from tests.balance.ranks import gradients
from tests.balance.test_packing import collate, of_one_at_a_time
from tests.balance.tiny import make_model, sample

NUM_SAMPLES = 6


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_gradients_of_packed_microbatches_are_exact(kind, tmp_path):
    model, found = make_model(kind), []
    samples = [sample(kind, model, n, [1] * (n % 3), [2] * (n % 2), num_text=6 + 9 * n) for n in range(NUM_SAMPLES)]
    dataset = [{**s, "length": s["input_ids"].shape[1]} for s in samples]

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
            found.append(gradients(model))

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, learning_rate=0.0, gradient_accumulation_steps=2, max_grad_norm=0.0,
        per_device_train_batch_size=NUM_SAMPLES // 2, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, data_seed=0,
    )  # fmt: skip

    def without_length(rows):
        return collate([{name: value for name, value in row.items() if name != "length"} for row in rows])

    trainer = BalancedTrainer(model, arguments, without_length, dataset, packing="exact", callbacks=[Keep()])
    trainer.train()
    assert not trainer.balanced_sampler.planner.padded
    expected = of_one_at_a_time(kind, samples)
    for name, exact in expected.items():
        assert float((found[0][name] - exact).norm()) <= 1e-5 * float(exact.norm()) + 1e-9, name


def test_another_packing_is_refused():
    with pytest.raises(ConfigError, match="packing is `rough`"):
        BalancedTrainer(torch.nn.Linear(1, 1), packing="rough")
