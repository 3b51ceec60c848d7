"""What each lever of the engine is worth on a GPU, in seconds and in memory: parts of `evidence`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dflop.cost.flops import peak_flops_per_s
from dflop.models import attention
from dflop.models.ways import TRAIN, Way, apply_way
from dflop.profile.hardware import hardware_name
from dflop.records import LLM, SampleShape
from dflop.train.buckets import GradientBuckets
from tests.gpu.drawn import make_shapes
from tests.gpu.one_step import Whole, filled, run
from tests.gpu.subject import Subject

NUM_SAMPLES = 24
Lever = Callable[[Whole], Any]


def levers(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Packed microbatches, forward and backward, with one lever moved at a time: seconds and peak bytes."""
    whole = Whole(subject, plain=False)
    batch = sorted(make_shapes(whole.family, subject.size(NUM_SAMPLES, 4), seed=3), key=lambda s: -s.num_llm_tokens)
    microbatches = filled(batch, 8192)
    names = {f"{n}.{name}": p for n, stage in enumerate((whole.vision, whole.llm)) for name, p in stage.names.items()}
    for p in names.values():
        p.grad_dtype = torch.float32
    buckets = GradientBuckets(names, {}, None)
    for name, moved in LEVERS.items():
        started_s = time.monotonic()
        try:
            with moved(whole):
                yield {"lever": name, **measured(whole, microbatches, buckets), "wall_s": time.monotonic() - started_s}
        except Exception as error:  # the others are worth as much
            yield {"lever": name, "error": f"{type(error).__name__}: {error}"[:400]}
        torch.cuda.empty_cache()
        if time.monotonic() > deadline_s:
            return


def measured(
    whole: Whole, microbatches: Sequence[Sequence[SampleShape]], buckets: GradientBuckets | None
) -> dict[str, Any]:
    """Second of two passes over the microbatches; gradients are zeroed in buckets, or let go of."""
    is_cuda = whole.subject.device.type == "cuda"
    forwards = [whole.packed(m) for m in microbatches]
    run(whole, forwards)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    took_s, loss = run(whole, forwards)
    peak = torch.cuda.max_memory_allocated() if is_cuda else 0
    if buckets is None:
        whole.vision.zero_grad()
        whole.llm.zero_grad()
    else:
        buckets.zero()
    samples = [s for m in microbatches for s in m]
    num_tokens = sum(s.num_llm_tokens for s in samples)
    flops = whole.flops.count(samples) / peak_flops_per_s(hardware_name(whole.subject.device.type), "bfloat16")
    return {
        "seconds": took_s, "tokens_per_s": num_tokens / took_s, "mfu": flops / took_s, "peak_bytes": peak,
        "loss_per_token": loss / sum(s.num_supervised_tokens for s in samples), "microbatches": len(microbatches),
    }  # fmt: skip


@contextmanager
def as_trained(whole: Whole) -> Iterator[None]:
    """What training does."""
    yield


@contextmanager
def eager_layers(whole: Whole) -> Iterator[None]:
    """Hugging Face's own RMS norms and MLPs."""
    fused = [m for stage in (whole.vision, whole.llm) for m in stage.modules() if "forward" in vars(m)]
    kept = [(m, vars(m).pop("forward")) for m in fused]
    try:
        yield
    finally:
        for module, forward in kept:
            module.forward = forward


@contextmanager
def loss_at_once(whole: Whole) -> Iterator[None]:
    """All logits of a microbatch in float32."""
    kept = whole.llm.head_loss

    def at_once(hidden: Any, weight: Any, bias: Any, targets: Any, num_tokens: int, _of_tokens: Any) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_tokens

    whole.llm.head_loss = at_once
    try:
        yield
    finally:
        whole.llm.head_loss = kept


def running(*modules: str, way: Way = TRAIN, offload: bool = False) -> Lever:
    """All layers of modules run in a way, or with their activations on the host."""

    @contextmanager
    def moved(whole: Whole) -> Iterator[None]:
        stages = [whole.llm if m == LLM else whole.vision for m in modules]
        for stage in stages:
            apply_way(stage, way, num_offloaded=offload * len(stage.layers))
        try:
            yield
        finally:
            for layer in (layer for stage in stages for layer in stage.layers):
                layer.gradient_checkpointing = False

    return moved


def kernel(name: str) -> Lever:
    """A kernel of attention in the decoder."""

    @contextmanager
    def moved(whole: Whole) -> Iterator[None]:
        device = whole.subject.device.type
        attention.use(whole.llm, attention.resolve(name, device, whole.dtype))
        try:
            yield
        finally:
            attention.use(whole.llm, attention.resolve(attention.AUTO, device, whole.dtype))

    return moved


def compiled(*modules: str, fused: bool) -> Lever:
    """Every layer compiled by itself, for any number of tokens."""

    @contextmanager
    def moved(whole: Whole) -> Iterator[None]:
        torch._dynamo.reset()
        layers = [x for m in modules for x in (whole.llm.decoder.layers if m == LLM else whole.vision.layers)]
        with as_trained(whole) if fused else eager_layers(whole):
            for layer in layers:
                layer.compile(dynamic=True)
            try:
                yield
            finally:
                for layer in layers:
                    layer._compiled_call_impl = None

    return moved


LEVERS: Mapping[str, Lever] = {
    "as trained": as_trained,
    "Hugging Face's norms and MLPs": eager_layers,
    "loss at once": loss_at_once,
    "all layers recomputed": running("vision", LLM, way=Way(recompute=True)),
    "activations of decoder layers on the host": running(LLM, offload=True),
    "attention: sdpa, a call per length": kernel(attention.SDPA),
    "compiled decoder layers": compiled(LLM, fused=False),
    "compiled decoder layers, our norms and MLPs": compiled(LLM, fused=True),
    "compiled layers of both": compiled("vision", LLM, fused=False),
    "as trained, again": as_trained,
}


def copies(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Between pinned host memory and the device: what offloading activations would go through."""
    if subject.device.type != "cuda":
        return
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=subject.device)
    for name, target, source in (("to device", there, host), ("to host", host, there)):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started_s)
        yield {"copy": name, "bytes_per_s": host.nbytes / min(times)}
