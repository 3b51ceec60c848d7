"""Somebody's GRPO with TRL: questions about images, and the scored rollouts of all ranks dealt by cost."""

import pickle
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import Dataset
from PIL import Image
from tiny_vlm import make_model, make_processor
from torch.nn.functional import pad
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from dflop.balance import deal
from dflop.schedule.pack import over_ranks

BOTH = {"token_type_ids", "mm_token_type_ids"}
OF_PROMPT = {"prompt_ids", "prompt_mask"} | BOTH
OF_COMPLETION = {"completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps", "tool_mask"} | BOTH


class DealtGRPOTrainer(GRPOTrainer):
    """Each rank trains the rollouts that it was dealt, whoever generated them. Every prompt has an image."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        number, rank, batch = len(inputs), self.accelerator.process_index, split_pixel_values_by_grid(batch)
        batch["pixel_values"] = [pixels.clone() for pixels in batch["pixel_values"]]  # a view is sent with all of it
        rollouts = [narrowed(one) for one in split_tensor_dict(batch, number)]
        sizes = [(sum(widths(one)), len(one["pixel_values"][0])) for one in rollouts]
        owners = self.owners(*np.array(gather_object(sizes)).T)[rank * number : (rank + 1) * number]
        parcels = [[rollouts[i] for i in np.flatnonzero(owners == r)] for r in range(dist.get_world_size())]
        return unsplit_pixel_values_by_grid(joined(exchanged(parcels, self.accelerator.device)))

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, narrowed(inputs))

    def owners(self, tokens, patches):
        """Rank of every rollout: all ranks get as many, which TRL's means and metrics want."""
        num_ranks, model = dist.get_world_size(), self.accelerator.unwrap_model(self.model).model
        llm, vision = (sum(p.numel() for p in part.parameters()) for part in (model.language_model, model.visual))
        costs = tokens * llm + patches * vision
        by_cost = deal(tokens, num_ranks, costs, equal_counts=True).rank
        ways = {
            "as generated": np.repeat(range(num_ranks), len(tokens) // num_ranks),
            "tokens balanced": over_ranks(tokens, num_ranks, 1)[1], "dealt by cost": by_cost,
        }  # fmt: skip
        loads = {way: np.bincount(rank, costs, num_ranks) for way, rank in ways.items()}
        waiting = ", ".join(f"{1 - load.mean() / load.max():.1%} {way}" for way, load in loads.items())
        if self.accelerator.is_main_process:
            print(f"step {self.state.global_step}: predicted waiting {waiting}", flush=True)
        return by_cost


def widths(batch):
    """Tokens of the longest prompt and of the longest completion."""
    return int(batch["prompt_mask"].sum(1).max()), max(1, int(batch["completion_mask"].sum(1).max()))


def narrowed(batch):
    """Without the padding that none of its rollouts needs."""
    (before, after), width = widths(batch), batch["prompt_mask"].shape[1]
    cuts = {key: slice(0, after) for key in OF_COMPLETION}
    cuts |= {key: slice(width - before, width + after if key in BOTH else width) for key in OF_PROMPT}
    return {key: value[:, cuts[key]].clone() if key in cuts else value for key, value in batch.items()}


def joined(rollouts):
    """One batch, padded as TRL does: prompts left, completions right."""
    longest = np.max([widths(one) for one in rollouts], axis=0)
    padding = [(longest - widths(one)).tolist() for one in rollouts]
    batch = {}
    for key, value in rollouts[0].items():
        values = [one[key] for one in rollouts]
        if key in OF_PROMPT | OF_COMPLETION:
            values = [
                pad(v, (before * (key in OF_PROMPT), after * (key in OF_COMPLETION)))
                for v, (before, after) in zip(values, padding, strict=True)
            ]
        is_common = isinstance(value, torch.Tensor) and not value.ndim
        batch[key] = (
            value if is_common else [*chain.from_iterable(values)] if isinstance(value, list) else torch.cat(values)
        )
    return batch


def exchanged(parcels, device):
    """All that the ranks have for this one; `parcels` has a list for every rank."""
    sent = [torch.frombuffer(bytearray(pickle.dumps(parcel)), dtype=torch.uint8) for parcel in parcels]
    sizes = torch.tensor([len(data) for data in sent], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes)
    data = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(data, torch.cat(sent).to(device), coming.tolist(), sizes.tolist())
    return [one for part in data.cpu().split(coming.tolist()) for one in pickle.loads(part.numpy().tobytes())]


class KeepGradient(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        self.found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))


def questions(number=8):
    """Of one to three images of many sizes each."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        sides = np.clip(rng.lognormal(4.4, 0.7, (rng.integers(1, 4), 2)), 28, 400).astype(int)
        images = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sides]
        yield {"prompt": [{"role": "user", "content": "What is it?"}], "images": images}


def train(trainer_class, num_steps):
    keep = KeepGradient()
    arguments = GRPOConfig(
        "out", use_cpu=True, bf16=False, per_device_train_batch_size=1, gradient_accumulation_steps=8,
        num_generations=4, max_completion_length=96, max_steps=num_steps, learning_rate=1e-3, max_grad_norm=0.0,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    rows = Dataset.from_list(list(questions()))
    trainer_class(make_model(), vowels, arguments, rows, processing_class=make_processor(), callbacks=[keep]).train()
    return keep.found[0]


def vowels(completions, **_):
    """The reward."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.lower().count(vowel) for vowel in "aeiou") / (1 + len(text)) for text in texts]


usual, dealt = train(GRPOTrainer, 1), train(DealtGRPOTrainer, 3)
if not dist.get_rank():
    print(f"error of the first step's gradient: {float((dealt - usual).norm() / usual.norm()):.1e}")
dist.destroy_process_group()
