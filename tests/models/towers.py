"""What real vision towers attend over."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def attended(tower: torch.nn.Module, grid: tuple[int, int, int], blocks: Iterable[torch.nn.Module]) -> list[int]:
    """Sum of squared attention lengths in each of `blocks`, for one item of `grid`."""
    found = []

    def note(_block: torch.nn.Module, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        lengths = kwargs["cu_seqlens"].long().diff()
        found.append(int(lengths.pow(2).sum()))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    config = tower.config
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    with torch.no_grad():
        tower(torch.zeros(grid[0] * grid[1] * grid[2], values), torch.tensor([grid]))
    for hook in hooks:
        hook.remove()
    return found
