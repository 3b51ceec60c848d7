"""Prove on several GPUs what no single one can: `torchrun --nproc-per-node 8 -m tests.gpu.nccl --minutes 10`.

Every rank has a GPU, messages go over NCCL. Layouts of at most as many ranks as there are run one after the other, each
in a process group of its own, those with few ranks first:

- `connect`: seconds and GPU memory that the communicators of a pipeline take, against what the planner sets aside;
- `messages`: bytes per second of a message between two stages, with the channels that messages have;
- every layout of `tests/train/layouts.py` and `layouts_context.py`: losses, norms and gradients equal Hugging Face's on
  one GPU: split and inline plans, tensor, sequence, context and pipeline parallelism, FSDP2, HSDP, shared parameters,
  frozen, recomputed and offloaded modules;
- those of `tests/train/test_zero.py`: weights behind four updates of which replicas share out the optimizer (ZeRO-1).

`--backend gloo` rehearses it on CPUs. docs/gpus.md says what this leaves open.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.parallel.topology import connect, make_groups
from dflop.records import LLM
from tests.train import test_zero
from tests.train.layouts import LAYOUTS, OTHERS
from tests.train.layouts_context import HEART
from tests.train.parity import assert_equal_steps, reference, train
from tests.train.synthetic import make_plan

TOLERANCE = {"gloo": 1e-5, "nccl": 1e-4}
TIMEOUT_S, MESSAGE_BYTES = 180, 128 << 20
Check = Callable[[str, float], str]
"""From (device, tolerance) to what is to be said; raises AssertionError on rank 0 where something differs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=TOLERANCE, default="nccl")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", default="", metavar="TEXT", help="only checks in whose names this is")
    args = parser.parse_args()
    backend, local, end_s = args.backend, int(os.environ["LOCAL_RANK"]), time.monotonic() + 60 * args.minutes
    device = f"cuda:{local}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(local)
    store, rank, num_all = next(dist.rendezvous("env://"))
    ends, skipped = dict[str, bool](), 0
    for number, (name, num_ranks, check) in enumerate(checks(num_all, args.only)):
        # All ranks do what rank 0 has time for, some before the others.
        key, is_late = f"go/{number}", time.monotonic() > end_s
        if rank == 0:
            store.set(key, "late" if is_late else "go")
        if store.get(key) == b"late":
            skipped += 1
            continue
        if rank >= num_ranks:
            continue
        with _world(backend, dist.PrefixStore(str(number), store), rank, num_ranks):
            started_s = time.monotonic()
            try:
                said, ends[name] = check(device, TOLERANCE[backend]), True
            except AssertionError as error:
                said, ends[name] = str(error), False
            if rank == 0:
                state = "ok     " if ends[name] else "DIFFERS"
                print(f"{state} {time.monotonic() - started_s:5.1f} s  {num_ranks} ranks, {name}  {said}", flush=True)
    if rank == 0:
        print(f"{sum(ends.values())} of {len(ends)} checks hold over {backend}, {skipped} not begun for want of time")
        store.set("over", "differs" if not all(ends.values()) else "ok")
    sys.exit(store.get("over") != b"ok")


def checks(num_all: int, only: str) -> Iterator[tuple[str, int, Check]]:
    """(name, ranks, check) of what so many ranks can do, those of few ranks first."""
    found: list[tuple[str, int, Check]] = []
    for n in sorted({min(n, num_all) for n in (2, 4, 8)}):
        found.append((f"pipeline of {n} connects", n, partial(_connects, n)))
    found.append(("messages", 2, _messages))
    for name, layout in (LAYOUTS | HEART | OTHERS).items():
        found.append((name, layout.plan.num_processes, partial(_parity, layout)))
    for name, (layout, *_) in test_zero.CASES.items():
        found.append((f"ZeRO-1, {name}", layout.plan.num_processes, partial(_shared_updates, name)))
    yield from (one for one in sorted(found, key=lambda of: of[1]) if one[1] <= num_all and only in one[0])


@contextmanager
def _world(backend: str, store: dist.Store, rank: int, num_ranks: int) -> Iterator[None]:
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        yield
        if backend == "nccl":
            torch.cuda.synchronize()
        store.add("done", 1)
        while int(store.add("done", 0)) < num_ranks:
            time.sleep(0.01)  # nobody ends while others still send
    finally:
        dist.destroy_process_group()


def _connects(num_stages: int, device: str, _: float) -> str:
    plan, rank, is_cuda = make_plan({LLM: (num_stages, 1)}, num_microbatches=1), dist.get_rank(), device != "cpu"
    groups = make_groups(plan, rank, timeout_s=TIMEOUT_S)
    free, started_s = torch.cuda.mem_get_info()[0] if is_cuda else 0, time.monotonic()
    connect(groups, plan, torch.device(device))
    taken_s, now_free = time.monotonic() - started_s, torch.cuda.mem_get_info()[0] if is_cuda else 0
    return f"in {taken_s:.1f} s, {(free - now_free) / 2**20:.0f} MiB of rank 0's GPU (1,024 are set aside for NCCL)"


def _messages(device: str, _: float) -> str:
    plan, rank = make_plan({LLM: (2, 1)}, num_microbatches=1), dist.get_rank()
    groups = make_groups(plan, rank, timeout_s=TIMEOUT_S)
    connect(groups, plan, torch.device(device))
    tensor, best_s = torch.zeros(MESSAGE_BYTES // 4, device=device), float("inf")
    for _ in range(4):
        if device != "cpu":
            torch.cuda.synchronize()
        started_s = time.monotonic()
        work = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank, group=groups.forward)
        assert work is not None
        work.wait()
        if device != "cpu":
            torch.cuda.synchronize()
        best_s = min(best_s, time.monotonic() - started_s)
    return f"{MESSAGE_BYTES / best_s / 1e9:.1f} GB/s from stage to stage"


def _parity(layout: Any, device: str, tolerance: float) -> str:
    of_ranks = _gathered(train(dist.get_rank(), Path(), replace(layout.trial, device=device)))
    if dist.get_rank() == 0:
        expected = reference(layout.subject, frozen=layout.frozen, bad_positions=layout.bad, device=device)
        assert_equal_steps(of_ranks, expected, tolerance)
    return ""


def _shared_updates(name: str, device: str, tolerance: float) -> str:
    """Against updates that every replica makes alone."""
    (_, alone, *_), (_, shared, *_) = (
        test_zero.worker(dist.get_rank(), Path(), name, shard, num_bytes, device)
        for shard, num_bytes in ((False, 256 << 20), (True, 10_000))
    )
    wrong = [n for n, p in shared[-1].items() if not torch.allclose(p, alone[-1][n], rtol=tolerance, atol=1e-6)]
    differ = sorted({n for of_rank in _gathered(wrong) for n in of_rank})
    assert not differ, ", ".join(differ)
    return ""


def _gathered(mine: Any) -> list[Any]:
    of_ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine, group=dist.new_group(backend="gloo"))
    return of_ranks


if __name__ == "__main__":
    main()
