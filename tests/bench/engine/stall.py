"""How long a checkpoint holds up training: seconds until the thread that trains goes on, written behind it or not."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dflop.records import Plan, StepPlan
from dflop.train.checkpoint import Checkpointer
from tests.bench.engine.contenders import EngineRank
from tests.bench.engine.samples import Workload
from tests.bench.schedule.real_ranks import prepare_process

KEEP = 2


@dataclass(frozen=True)
class Stall:
    """Seconds of one rank, an entry per checkpoint; medians over these are the figures."""

    state_bytes: int
    """Weights and optimizer state of the whole model."""
    asynchronous_s: list[float]
    """Held by `save`."""
    synchronous_s: list[float]
    """Held by `save` and the wait for the disk."""
    step_s: list[float]
    """Steps with nothing written beside them."""
    step_beside_write_s: list[float]
    """Steps behind an asynchronous `save`."""


def measure(
    rank: int, folder: Path, workload: Workload, plan: Plan, step_plans: tuple[StepPlan, ...], num_checkpoints: int
) -> Stall:
    """Checkpoints of both kinds in turn, each behind a step."""
    prepare_process(rank)
    engine = EngineRank(workload, plan, step_plans)
    checkpointer = Checkpointer(
        folder / "checkpoints", engine.stages, engine.optimizer, engine.groups, engine.sharded, keep=KEEP
    )
    num_batches, found = len(step_plans), Stall(_state_bytes(engine), [], [], [], [])
    checkpointer.save(0, {})  # uncounted: host memory is taken once
    checkpointer.wait()
    for n in range(num_checkpoints):
        found.step_s.append(_step_s(engine, n % num_batches))
        found.asynchronous_s.append(_held_s(checkpointer, 2 * n + 1, waits=False))
        found.step_beside_write_s.append(_step_s(engine, n % num_batches))
        checkpointer.wait()
        found.synchronous_s.append(_held_s(checkpointer, 2 * n + 2, waits=True))
    checkpointer.close()
    return found


def _held_s(checkpointer: Checkpointer, next_step: int, *, waits: bool) -> float:
    dist.barrier()
    since = time.perf_counter()
    checkpointer.save(next_step, {})
    if waits:
        checkpointer.wait()
    return time.perf_counter() - since


def _step_s(engine: EngineRank, index: int) -> float:
    dist.barrier()
    since = time.perf_counter()
    engine.step(index)
    dist.barrier()
    return time.perf_counter() - since


def _state_bytes(engine: EngineRank) -> int:
    moments = (t for tensors in engine.optimizer.state().values() for t in tensors.values())
    return sum(s.param_bytes for s in engine.stages) + sum(t.numel() * t.element_size() for t in moments)


def figures(stall: Stall) -> dict[str, float]:
    """Of the rank that was held longer."""
    asynchronous_s, synchronous_s = statistics.median(stall.asynchronous_s), statistics.median(stall.synchronous_s)
    return {
        "state_bytes": stall.state_bytes,
        "asynchronous_s": asynchronous_s,
        "synchronous_s": synchronous_s,
        "synchronous / asynchronous": statistics.geometric_mean(
            [s / a for s, a in zip(stall.synchronous_s, stall.asynchronous_s, strict=True)]
        ),
        "step_s": statistics.median(stall.step_s),
        "step_beside_write_s": statistics.median(stall.step_beside_write_s),
    }
