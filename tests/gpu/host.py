"""What a GPU's host does for a step, and what kernels wait for: parts of `evidence`."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dflop.records import LLM, SampleShape
from tests.gpu.drawn import make_shapes
from tests.gpu.levers import as_trained, compiled
from tests.gpu.one_step import Whole, filled
from tests.gpu.subject import Subject
from tests.train.rank import Rank
from tests.train.synthetic import make_inline_plan, make_step_plan


def trace(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Forward and backward of encoder, decoder and loss, eager and compiled: where the device waits for the host."""
    whole = Whole(subject, plain=False)
    shapes = make_shapes(whole.family, subject.size(64, 4), seed=3)
    for way, moved in (("as trained", as_trained), ("compiled", compiled("vision", LLM, fused=False))):
        with moved(whole):
            for most in (8192, 2048):
                microbatch = filled([s for s in shapes if s.num_llm_tokens < most], most)[0]
                for part, run in parts(whole, microbatch).items():
                    yield {"part": part, "way": way, "llm_tokens": most, **profiled(subject, run)}
                    if time.monotonic() > deadline_s:
                        return


def parts(whole: Whole, microbatch: Sequence[SampleShape]) -> dict[str, Callable[[], None]]:
    """What a microbatch consists of, each forward and backward."""
    inputs = whole.inputs(microbatch)
    hidden = torch.randn(len(inputs.ids), whole.llm.hidden_size, device=inputs.ids.device, dtype=whole.dtype)
    hidden.requires_grad_()

    def encoder() -> None:
        rows = whole.vision(inputs.pixels, inputs.sizes)
        rows.backward(torch.ones_like(rows))

    def decoder() -> None:
        out = whole.llm(hidden, inputs.positions, inputs.cu_seqlens)
        out.backward(torch.ones_like(out))

    def loss() -> None:
        whole.llm.loss(hidden, inputs.where, inputs.targets).backward()

    return {"decoder": decoder, "encoder": encoder, "loss": loss}


def profiled(subject: Subject, run: Callable[[], None]) -> dict[str, Any]:
    """Seconds on the device and of the host alone; kernels, and for how long any of them runs."""
    for _ in range(3):
        run()
    if subject.device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(3):
        run()
    host_s = (time.perf_counter() - started_s) / 3
    torch.cuda.synchronize()
    row = {"seconds": (time.perf_counter() - started_s) / 3, "host_s": host_s}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return row | kernels_of(found)


def kernels_of(found: Any) -> dict[str, Any]:
    """Of a profile of the device: kernels, seconds in which one runs, and the longest of them by name."""
    events = [e for e in found.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)
    busy_ns = end_ns = 0
    for first, last in spans:
        busy_ns += max(0, last - max(first, end_ns))
        end_ns = max(end_ns, last)
    took: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for e in events:
        took[e.name()[:120]] += e.duration_ns()
        number[e.name()[:120]] += 1
    longest = {name: [number[name], round(ns / 1e9, 6)] for name, ns in took.most_common(22)}
    return {"kernels": len(events), "busy_s": busy_ns / 1e9, "longest": longest}


def engine_waits(tiny: Any, device: torch.device, *, num_microbatches: int) -> Iterator[Mapping[str, Any]]:
    """Where the engine waits for the device in steps of a subject of `tests.train.parity`, whole on one rank."""
    is_cuda = device.type == "cuda"
    layers = {spec.module: spec.num_layers for spec in tiny.family.specs()}
    plan = make_inline_plan([layers], dp=1, num_microbatches=num_microbatches)
    model = tiny.build().to(device, torch.bfloat16 if is_cuda else torch.float32)
    rank = Rank(0, plan, tiny.family, model, device=device.type, is_alone=True)
    for number, batch in enumerate(tiny.batches):
        feed = rank.feed(tiny.source(batch), pins=is_cuda)
        prepared = feed.prepare(make_step_plan(plan, batch, number, text_only_slot=False))
        microbatches = feed.masked(prepared, torch.ones(len(batch), dtype=torch.bool)).microbatches
        places: Counter[str] = Counter()
        with waits_to(places, device):
            rank.engine.run(microbatches, num_loss_tokens=sum(s.num_supervised_tokens for s in batch))
        yield {"step": number, "microbatches": len(microbatches), "waits": dict(places.most_common())}


@contextmanager
def waits_to(places: Counter[str], device: torch.device) -> Iterator[None]:
    """Count lines of code that make the host wait for the device."""
    if device.type != "cuda":
        yield
        return

    def note(*_: Any, **__: Any) -> None:
        stack = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and "levers" not in f.filename]
        places[" < ".join(f"{'/'.join(f.filename.split('/')[-3:])}:{f.lineno}" for f in reversed(stack[-3:]))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
