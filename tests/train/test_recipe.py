"""A published recipe beside Hugging Face's Trainer: 50 steps with the same losses and the same weights behind them.

The recipe is that of Qwen2.5-VL's fine-tuning: a frozen tower, a vision encoder at a fifth of the rate but for its
merger, no decay of norms and biases, a clipped norm, a cosine to a tenth. The Trainer sees one sample at a time.
"""

from __future__ import annotations

import pytest
import torch

from dflop.config import GroupConfig
from dflop.data.sample_order import SampleOrder
from dflop.records import LLM
from dflop.train.loop import Hooks
from tests.train import synthetic
from tests.train.campaign import EpochPlans
from tests.train.rank import Rank, loop_settings
from tests.train.ranks import run_ranks

NUM_STEPS, BATCH_SIZE, PEAK, DECAY = 50, 6, 2e-3, 0.1
FROZEN = "audio"
RULES = (
    GroupConfig(targets=("vision",), lr_scale=0.2),
    GroupConfig(targets=("*.merger.*",), lr_scale=1.0),
    GroupConfig(targets=("norms", "biases"), weight_decay=0.0),
)
LAYOUTS = {
    "pipeline": synthetic.sharing_optimizer(
        synthetic.make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, num_microbatches=3)
    ),
    "fsdp2": synthetic.sharing(
        synthetic.make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=2, num_microbatches=3), synthetic.ALL
    ),
}

pytestmark = [pytest.mark.lane("layouts"), pytest.mark.timeout(600)]


def batches():
    shapes = synthetic.make_shapes(24, seed=11)
    order = SampleOrder(3, len(shapes), BATCH_SIZE)
    return shapes, order, [[shapes[i] for i in order.batch(step)] for step in range(NUM_STEPS)]


def train(rank, folder, plan):
    """Loss of every step, and the rank's weights behind them."""
    shapes, order, _ = batches()
    it = Rank(rank, plan, synthetic.family(), synthetic.tiny_model(), frozen=(FROZEN,), weight_decay=DECAY, rules=RULES)
    losses = []
    it.trainer(
        loop_settings("recipe", NUM_STEPS, PEAK, lr_floor_frac=0.1, max_grad_norm=1.0, checkpoint_every=NUM_STEPS),
        synthetic.SyntheticSource(shapes),
        EpochPlans(plan, shapes, order),
        Hooks(lambda seen: losses.append(seen.loss), lambda *event: pytest.fail(f"{event}")),
    ).run()
    return losses


@pytest.fixture(scope="module")
def trainer_losses(tmp_path_factory):
    from transformers import Trainer, TrainingArguments

    shapes, _, steps = batches()
    model = synthetic.plain_model()
    source, losses = synthetic.SyntheticSource(shapes), []
    for name, p in model.named_parameters():
        p.requires_grad_(".audio_tower." not in name)

    class Fine(Trainer):
        def compute_loss(self, model, inputs, **_):
            batch = steps[int(inputs["step"][0])]
            tokens = sum(shape.num_supervised_tokens for shape in batch)
            loss = sum(synthetic.loss_sum(model, source, shape) for shape in batch) / tokens
            losses.append(float(loss.detach()))
            # An encoder without items has gradients of zero, as under DDP; with none AdamW would leave it alone.
            return loss + 0 * sum(p.sum() for p in model.parameters() if p.requires_grad)

        def create_optimizer(self, *_):
            groups = {}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    scale = 0.2 if ".visual." in name and ".merger." not in name else 1.0
                    groups.setdefault((PEAK * scale, DECAY if p.ndim > 1 else 0.0), []).append(p)
            given = [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in groups.items()]
            self.optimizer = torch.optim.AdamW(given, betas=(0.9, 0.95), eps=1e-8)
            return self.optimizer

    arguments = TrainingArguments(
        str(tmp_path_factory.mktemp("trainer")), use_cpu=True, max_steps=NUM_STEPS, per_device_train_batch_size=1,
        learning_rate=PEAK, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_grad_norm=1.0, report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    Fine(model, arguments, train_dataset=[{"step": step} for step in range(NUM_STEPS)]).train()
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_the_trainer(layout, trainer_losses, tmp_path):
    plan = LAYOUTS[layout]
    losses, *others = run_ranks(train, plan.num_processes, tmp_path, plan)
    assert all(of_rank == losses for of_rank in others)
    assert losses == pytest.approx(trainer_losses, rel=1e-4)
    assert losses[-1] < 0.8 * losses[0], "nothing was learned"
