"""Seconds of forward, backward and optimizer step on whatever device there is.

CUDA: events around the phases, one synchronisation at the end, so that launches overlap with kernels as in training.
CPU: time of this thread, because another process on the core must not look like a slow shape; several ranks are timed
by the wall, because waiting for the others is part of what a tensor-parallel layer costs.

Both phases start with cold caches. In a deep model a layer's weights and activations have long left the cache when it
is their turn; a probe of one layer would find them there and flatter every layer: measured on a CPU, one and two layers
then predict eight 8-15 % too fast.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

CPU_CACHE_BYTES = 16 << 20
"""More than the caches that belong to one core; the one shared by all is everybody's at all times."""
GRADIENT = 1e-3
"""What the optimizer is timed with. Not zero: a CPU takes far longer over roots of zeros, twice over the whole step."""
Value = TypeVar("Value", int, float)


class CacheFlush:
    """Calling it leaves nothing of the model in the device's caches.

    Args:
        device: Whose caches.
    """

    def __init__(self, device: torch.device) -> None:
        num_bytes = CPU_CACHE_BYTES
        if device.type == "cuda":
            num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(num_bytes // 4, device=device)

    def __call__(self) -> None:
        self._buffer.add_(1.0)


def time_phases(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    device: torch.device,
    *,
    flush: Callable[[], None] = lambda: None,
    by_wall: bool = False,
) -> tuple[float, float]:
    """(forward_s, backward_s) of one run.

    Args:
        forward: Runs the module; its result is handed to `backward`.
        backward: Propagates gradients from it.
        device: Where both run.
        flush: Called before each phase, not timed.
        by_wall: On a CPU, wall time instead of this thread's.
    """
    if device.type == "cuda":
        return _time_on_cuda(forward, backward, device, flush)
    clock = time.perf_counter if by_wall else time.thread_time
    flush()
    started = clock()
    output = forward()
    forward_s = clock() - started
    flush()
    started = clock()
    backward(output)
    return forward_s, clock() - started


def _time_on_cuda(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    device: torch.device,
    flush: Callable[[], None],
) -> tuple[float, float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    flush()
    events[0].record(stream)
    output = forward()
    events[1].record(stream)
    flush()
    events[2].record(stream)
    backward(output)
    events[3].record(stream)
    events[3].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, events[2].elapsed_time(events[3]) / 1e3


def optimizer_step_s(params: Iterable[torch.nn.Parameter], device: torch.device, num_repeats: int) -> float:
    """Median seconds of an AdamW step, made as training makes it; weights stay as they are.

    What AdamW updates is float32: the weights, or master copies that 16-bit weights are rounded from.

    Args:
        params: Those without a gradient are left out, as the optimizer does.
        device: Where they are.
        num_repeats: Timed steps; one more, untimed, allocates the states.
    """
    trained = [p for p in params if p.grad is not None]
    if not trained:
        return 0.0
    updated = [p if p.dtype == torch.float32 else p.detach().float() for p in trained]
    for tensor in updated:
        tensor.grad = torch.full_like(tensor, GRADIENT)
    optimizer = torch.optim.AdamW(updated, lr=0.0, weight_decay=0.01, fused=updated[0].is_cuda or None)

    def step() -> torch.Tensor:
        optimizer.step()
        with torch.no_grad():
            for p, tensor in zip(trained, updated, strict=True):
                if tensor is not p:
                    p.copy_(tensor)
        return trained[0]

    step()
    return statistics.median(time_phases(step, lambda _: None, device)[0] for _ in range(num_repeats))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps Python's collector from running inside a timed phase."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def half_iqr(values: Iterable[float]) -> float:
    """Half the interquartile range: a spread that one outlier does not move."""
    low, high = np.percentile(list(values), [25, 75])
    return float(high - low) / 2


def of_first_rank(value: Value, ranks: dist.ProcessGroup | None) -> Value:
    """The first rank's value on all of them; None: this process is alone."""
    if ranks is None:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, group=ranks, group_src=0)
    return shared[0]
