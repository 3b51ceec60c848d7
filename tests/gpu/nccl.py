"""Ranks with a GPU each, over NCCL: `torchrun --nproc-per-node N -m tests.gpu.nccl`, for N of 2, 3, 4 and 8.

Every layout of `tests/train/test_parity.py` that has N ranks: split and inline plans, tensor, sequence, context and
pipeline parallelism, shared parameters, frozen and recomputed modules. Losses, norms and gradients are compared with
those of Hugging Face on one GPU. Then those of `tests/train/test_zero.py`: weights behind four updates that replicas
share out (ZeRO-1) are compared with those that each makes alone. `--backend gloo` rehearses it on CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.train import test_zero
from tests.train.parity import assert_equal_steps, reference, train
from tests.train.test_parity import LAYOUTS, OTHERS
from tests.train.test_parity_context import HEART

TOLERANCE = {"gloo": 1e-5, "nccl": 1e-4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=TOLERANCE, default="nccl")
    backend = parser.parse_args().backend
    local = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group(backend)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    objects = dist.new_group(backend="gloo")
    given, differ = (device, TOLERANCE[backend], objects), list[bool]()
    for name, what in itertools.chain(_parity(*given), _shared_updates(*given)):
        differ.append(bool(what))
        if rank == 0:
            print(f"DIFFERS  {name}: {what}" if what else f"equal    {name}", flush=True)
    if rank == 0:
        print(f"{differ.count(False)} of {len(differ)} layouts of {num_ranks} ranks are equal over {backend}")
    dist.barrier(group=objects)
    dist.destroy_process_group()
    sys.exit(any(differ))


def _parity(device: str, tolerance: float, objects: dist.ProcessGroup) -> Iterator[tuple[str, str]]:
    """(layout, what differs from Hugging Face's steps)."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, layout in (LAYOUTS | HEART | OTHERS).items():
        if layout.plan.num_processes != num_ranks:
            continue
        of_ranks = _gathered(train(rank, Path(), replace(layout.trial, device=device)), objects)
        expected = reference(layout.subject, frozen=layout.frozen, bad_positions=layout.bad, device=device)
        try:
            assert_equal_steps(of_ranks, expected, tolerance)
            yield name, ""
        except AssertionError as error:
            yield name, str(error)


def _shared_updates(device: str, tolerance: float, objects: dist.ProcessGroup) -> Iterator[tuple[str, str]]:
    """(case, what differs from updates that every replica makes alone)."""
    for name, (layout, *_) in test_zero.CASES.items():
        if layout.plan.num_processes != dist.get_world_size():
            continue
        (_, alone, *_), (_, shared, *_) = (
            test_zero.worker(dist.get_rank(), Path(), name, shard, num_bytes, device)
            for shard, num_bytes in ((False, 256 << 20), (True, 10_000))
        )
        wrong = [n for n, p in shared[-1].items() if not torch.allclose(p, alone[-1][n], rtol=tolerance, atol=1e-6)]
        yield f"ZeRO-1, {name}", ", ".join(sorted({n for of_rank in _gathered(wrong, objects) for n in of_rank}))


def _gathered(mine: Any, objects: dist.ProcessGroup) -> list[Any]:
    of_ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine, group=objects)
    return of_ranks


if __name__ == "__main__":
    main()
