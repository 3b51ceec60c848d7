"""Somebody's FSDP2 loop over chats with images and without: as it was, then with the images of all ranks dealt."""

import contextlib

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from tiny_vlm import make_model, make_processor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dflop.balance import balanced_encoder

STEPS, PER_RANK = 4, 3
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
processor = make_processor()


def chat(rng):
    """Words about no image, one or several, of many sizes."""
    sides = np.clip(rng.lognormal(4.6, 0.7, (rng.choice([0, 1, 3]), 2)), 28, 400).astype(int)
    media = [{"type": "image", "image": Image.fromarray(rng.integers(0, 255, (*s, 3), dtype=np.uint8))} for s in sides]
    return [{"role": "user", "content": [*media, {"type": "text", "text": "and so on " * rng.integers(1, 12)}]}]


def batches():
    rng = np.random.default_rng(rank)
    for _ in range(STEPS):
        chats = [chat(rng) for _ in range(PER_RANK)]
        batch = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )
        yield {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] < 6, -100)}


def train(dealing):
    """Per step the loss, mean over ranks, and the norm of the encoder's gradient."""
    model, mesh, found = make_model(), init_device_mesh("cpu", (num_ranks,)), []
    visual = model.model.visual
    for block in [*visual.blocks, visual, *model.model.language_model.layers]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with dealing(model) as dealer:
        for step, batch in enumerate(batches()):
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in visual.parameters()]).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / num_ranks)
            found.append(f"{mean:.6f} {norm:.6f}")
            if rank == 0 and dealer:
                print(f"step {step}: the encoder is {dealer.gain:.2f}x as fast so far, by its patches", flush=True)
    return found


for name, dealing in (("as it was", lambda model: contextlib.nullcontext()), ("dealt", balanced_encoder)):
    found = train(dealing)
    if rank == 0:
        print(f"losses and norms, {name}:", ", ".join(found), flush=True)
dist.destroy_process_group()
