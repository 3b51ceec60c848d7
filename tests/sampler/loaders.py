"""Loaders with worker processes, in a process that holds nothing else: prints what they gave as JSON."""

from __future__ import annotations

import json
import warnings

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.sampler.test_draws import LENGTHS, make


def left_early(num_workers: int) -> dict:
    """An epoch that is left two batches before its end, and the two after it."""
    sampler = make()
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, num_workers=num_workers, collate_fn=list)
    for number, _ in enumerate(loader, start=1):
        if number == len(loader) - 2:
            break
    return {"step": sampler.state_dict()["step"], "epochs": [list(loader), list(loader)]}


def resumed(num_workers: int, num_taken: int) -> list[list[int]]:
    """Batches of two epochs, with a checkpoint after `num_taken` of the first."""

    def loader() -> StatefulDataLoader:
        given = {"num_workers": num_workers, "collate_fn": list}
        return StatefulDataLoader(range(len(LENGTHS)), batch_sampler=make(), **given)

    first, second = loader(), loader()
    begun = iter(first)
    taken = [next(begun) for _ in range(num_taken)]
    second.load_state_dict(first.state_dict())
    return [*taken, *second, *second]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({
        "left early": {n: left_early(n) for n in (0, 1, 2)},
        "resumed": {f"{n} {k}": resumed(n, k) for n, k in ((0, 4), (0, 5), (2, 5), (0, 10), (2, 10))},
    }))  # fmt: skip
