"""What one of some gloo processes does: a step of a tiny model with its encoder's items dealt, and gradients of it."""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dflop.balance import Packing, PackingCollator, balanced_encoder
from tests.balance.tiny import make_model, sample

IMAGES: list[tuple[list[int], list[int]]] = [([9, 1], []), ([], []), ([1], []), ([2, 7, 3], [])]
"""(images, videos) of each rank's sample."""
VIDEOS: list[tuple[list[int], list[int]]] = [([5], []), ([], [2, 6]), ([], []), ([1], [3])]


def batch_of(kind: str, model: Any, rank: int, media: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    return sample(kind, model, rank, *media[rank])


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.replace("module.", "")] = grad.detach().clone()
    return found


def without_dealing(kind: str, num_ranks: int, media: Any, frozen: bool) -> dict[str, Tensor]:
    """The mean over ranks, each alone, as DDP and FSDP make it."""
    model = make_model(kind)
    freeze(model, frozen)
    for rank in range(num_ranks):
        (model(**batch_of(kind, model, rank, media)).loss / num_ranks).backward()
    return gradients(model)


def freeze(model: Any, frozen: bool) -> None:
    owner = model.model
    tower = owner.visual if hasattr(owner, "visual") else owner.vision_tower
    tower.requires_grad_(not frozen)


def step(
    rank: int, folder: Path, kind: str, wrapper: str, media: Any, frozen: bool, least: float
) -> tuple[dict[str, Tensor], float]:  # fmt: skip
    """(gradients, gain)."""
    model = make_model(kind)
    freeze(model, frozen)
    batch = batch_of(kind, model, rank, media)
    wrapped: Any = model
    packed = contextlib.nullcontext()
    if wrapper == "packed":
        packing, batch = Packing(model), PackingCollator(lambda samples: samples[0])([batch])
        packed = packing.of(batch)
    elif wrapper == "ddp":
        # LLaVA's tower has layers behind the one that is read.
        wrapped = DistributedDataParallel(model, find_unused_parameters=kind == "llava")
    elif wrapper == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [*model.model.visual.blocks, model.model.visual, *model.model.language_model.layers]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    with balanced_encoder(wrapped, min_gain=least) as dealer, packed:
        wrapped(**batch).loss.backward()
        gain = dealer.gain
    if wrapper == "packed":  # nobody sums
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad.div_(dist.get_world_size()))
    assert "get_image_features" not in vars(model.model)
    return gradients(model), gain
