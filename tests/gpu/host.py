"""What a GPU's host does for a step, and what kernels wait for: parts of `evidence`."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dflop.records import LLM
from dflop.train.buckets import GradientBuckets
from tests.gpu.drawn import make_shapes
from tests.gpu.one_step import Whole, backward, filled
from tests.gpu.subject import Subject
from tests.train.parity import Omni
from tests.train.rank import Rank
from tests.train.synthetic import make_inline_plan, make_step_plan

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def trace(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """One microbatch under torch's profiler: kernels, launches, waits of the host, and gaps between kernels."""
    whole = Whole(subject, plain=False)
    shapes = make_shapes(whole.family, subject.size(64, 4), seed=3)
    for most in (2048, 8192):
        forward = whole.packed(filled([s for s in shapes if s.num_llm_tokens < most], most)[0])
        for _ in range(3):
            backward(forward())
        is_cuda = subject.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]) as found:
            backward(forward())
            if is_cuda:
                torch.cuda.synchronize()
        yield {"microbatch": f"up to {most} tokens", **counts(found.events())}
        if time.monotonic() > deadline_s:
            return


def host_waits(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Where the engine waits for the device in a step of a tiny Qwen2.5-Omni of four microbatches on one rank."""
    omni = Omni(num_steps=3)
    plan = make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=4)
    dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
    rank = Rank(0, plan, omni.family, omni.build().to(dtype), device=subject.device.type, is_alone=True)
    for p in rank.names.values():
        p.grad_dtype = torch.float32
    GradientBuckets(rank.names, {}, None)
    for number, batch in enumerate(omni.batches):
        source, given = omni.source(batch), make_step_plan(plan, batch, number)
        prepared = rank.prepare(source, given)
        places: Counter[str] = Counter()
        healthy, tokens = torch.ones(len(batch), dtype=torch.bool), sum(s.num_supervised_tokens for s in batch)
        with waits_to(places, subject.device):
            rank.engine.run(prepared.microbatches, healthy=healthy, num_loss_tokens=tokens)
        yield {"step": number, "microbatches": len(prepared.microbatches), "waits": dict(places.most_common())}


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


def counts(events: Any) -> dict[str, Any]:
    """Of a profile: what ran on the device and what the host did for it."""
    on_device = [e for e in events if "CUDA" in str(e.device_type)]
    names = Counter(e.name for e in events)
    row: dict[str, Any] = {
        "launches": sum(n for name, n in names.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))),
        "waits": {name: names[name] for name in WAITS if names[name]},
        "copies": {n: c for n, c in names.items() if n.startswith("Memcpy") or n in ("aten::item", "aten::nonzero")},
    }
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_device)
    if not spans:
        return row | {"operators": sum(n for name, n in names.items() if name.startswith("aten::"))}
    gaps, end = [], spans[0][0]
    for first, last in spans:
        if first > end:
            gaps.append(first - end)
        end = max(end, last)
    took: Counter[str] = Counter()
    for e in on_device:
        took[e.name[:90]] += e.time_range.end - e.time_range.start
    return row | {
        "kernels": len(spans), "span_us": end - spans[0][0], "gap_us": sum(gaps), "longest_gaps_us": sorted(gaps)[-5:],
        "longest": dict(took.most_common(14)),
    }  # fmt: skip
