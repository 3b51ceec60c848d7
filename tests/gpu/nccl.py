"""Ranks with a GPU each, over NCCL: `torchrun --nproc-per-node N -m tests.gpu.nccl`, for N of 2, 3, 4 and 8.

Every layout of `tests/train/test_parity.py` that has N ranks: split and inline plans, tensor, sequence and pipeline
parallelism, shared parameters, frozen and recomputed modules. Losses, norms and gradients are compared with those of
Hugging Face on one GPU. `--backend gloo` rehearses it on CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.parity import assert_equal_steps, reference, train
from tests.train.test_parity import LAYOUTS, OTHERS

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
    chosen = {name: of for name, of in (LAYOUTS | OTHERS).items() if of.plan.num_processes == num_ranks}
    failed = 0
    for name, layout in chosen.items():
        steps = train(rank, Path(), replace(layout.trial, device=device))
        of_ranks = [steps] * num_ranks
        dist.all_gather_object(of_ranks, steps, group=objects)
        if rank == 0:
            expected = reference(layout.subject, frozen=layout.frozen, bad_positions=layout.bad, device=device)
            try:
                assert_equal_steps(of_ranks, expected, TOLERANCE[backend])
                print(f"equal    {name}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"DIFFERS  {name}: {error}", flush=True)
    if rank == 0:
        print(f"{len(chosen) - failed} of {len(chosen)} layouts of {num_ranks} ranks equal Hugging Face over {backend}")
    dist.barrier(group=objects)
    dist.destroy_process_group()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
