"""One rank on one device, as training runs it: parts of `evidence`."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.model import CostModel
from dflop.parallel.topology import connect
from dflop.profile.hardware import hardware_name
from dflop.records import LLM
from dflop.train.plan_source import PlanMessage
from tests.gpu.drawn import make_shapes
from tests.gpu.host import engine_waits, parts
from tests.gpu.layers import sheet_of
from tests.gpu.levers import as_trained, measured, running
from tests.gpu.one_step import Whole, filled
from tests.gpu.ranks import outcome
from tests.gpu.subject import Subject
from tests.models.tiny_families import CASES
from tests.train.parity import Omni
from tests.train.rank import Rank
from tests.train.synthetic import make_inline_plan, make_step_plan
from tests.train.tiny_subject import Tiny


def offload(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Six microbatches with the activations of all decoder layers on the host, and without: seconds and memory.

    `sheet_bytes` is what the data sheet's tables say that the layers of the largest microbatch keep.
    """
    whole = Whole(subject, plain=False)
    batch = sorted(make_shapes(whole.family, subject.size(48, 8), seed=3), key=lambda s: -s.num_llm_tokens)
    microbatches = filled(batch, 8192)[:6]
    specs = whole.family.specs()
    sheet = sheet_of(hardware_name(subject.device.type))
    cost = CostModel(analytic_cost_tables(specs, sheet, profile_key=""), extrapolate=True)
    tokens = [s.num_llm_tokens for s in microbatches[0]]
    load, depth = (len(tokens), sum(tokens), sum(n * n for n in tokens)), len(whole.llm.layers)
    sheet_bytes = float(cost.activation_bytes(LLM, load, num_layers=depth, edge=False))
    for way, moved in (("kept", as_trained), ("on the host", running(LLM, offload=True))):
        with moved(whole):
            row = {"activations": way, **measured(whole, microbatches, None)}
            yield {**row, "sheet_bytes": sheet_bytes, **_memory(subject)}
        if time.monotonic() > deadline_s:
            return


def _memory(subject: Subject) -> dict[str, Any]:
    if subject.device.type != "cuda":
        return {}
    stats, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    torch.cuda.empty_cache()
    return {
        "reserved_bytes": stats["reserved_bytes.all.peak"], "alloc_retries": stats["num_alloc_retries"],
        "host_bytes": host.get("allocated_bytes.peak", host.get("active_bytes.peak")),
    }  # fmt: skip


def host_waits(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Of every family, lines of code at which the engine waits for the device, in a step of two microbatches."""
    for name in CASES:
        for row in engine_waits(Tiny(name), subject.device, num_microbatches=2):
            yield {"family": name, **row}
        if time.monotonic() > deadline_s:
            return


def launches(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Passes of 2,048 tokens, which launches bound: alone, and beside a thread that decodes plans as the feed does."""
    whole = Whole(subject, plain=False)
    shapes = make_shapes(whole.family, subject.size(64, 8), seed=3)
    microbatch = filled([s for s in shapes if s.num_llm_tokens < 2048], 2048)[0]
    run = parts(whole, microbatch)["decoder"]
    plan = make_inline_plan([{"vision": 1, LLM: 1}], dp=8, num_microbatches=8)
    text = PlanMessage(make_step_plan(plan, make_shapes(whole.family, subject.size(2048, 64), seed=5), 0), {}).encode()
    interval_s = sys.getswitchinterval()
    for beside, switch_s in (("nothing", interval_s), ("plans", interval_s), ("plans", 0.0005)):
        is_over = threading.Event()
        thread = threading.Thread(target=_decode, args=(text, is_over))
        sys.setswitchinterval(switch_s)
        try:
            if beside == "plans":
                thread.start()
            yield {"beside": beside, "switch_interval_s": switch_s, **_timed(subject, run)}
        finally:
            is_over.set()
            sys.setswitchinterval(interval_s)
            if thread.is_alive():
                thread.join()
        if time.monotonic() > deadline_s:
            return


def _decode(text: str, is_over: threading.Event) -> None:
    while not is_over.is_set():
        PlanMessage.decode(text)


def _timed(subject: Subject, run: Callable[[], None], num_repeats: int = 5) -> dict[str, float]:
    """Seconds of a pass, and those in which the host has given the device all of it."""
    is_cuda = subject.device.type == "cuda"
    run()
    if is_cuda:
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(num_repeats):
        run()
    host_s = time.perf_counter() - started_s
    if is_cuda:
        torch.cuda.synchronize()
    return {"seconds": (time.perf_counter() - started_s) / num_repeats, "host_s": host_s / num_repeats}


def alone(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """A world of one, over NCCL where there is a GPU: groups, collectives that training calls, then a step."""
    device, values = subject.device, torch.ones(64, device=subject.device)
    with _world_of_one("nccl" if device.type == "cuda" else "gloo"):
        calls: Mapping[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(values),
            "reduce": lambda: dist.reduce(values, group=dist.group.WORLD, group_dst=0),
            "broadcast": lambda: dist.broadcast(values, group=dist.group.WORLD, group_src=0),
            "all_gather": lambda: dist.all_gather([torch.empty_like(values)], values),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(values), values),
            "groups, connect, step": lambda: _step(subject, connects=True),
        }
        for name, call in calls.items():
            yield {"call": name, "backend": dist.get_backend(), **outcome(lambda _, call=call: call())}
            if time.monotonic() > deadline_s:
                return


def repeated(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Whether two runs of a step have the same bits."""
    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            with _world_of_one("gloo"):
                first, second = _step(subject), _step(subject)
            different = sorted(name for name, gradient in first.items() if not torch.equal(gradient, second[name]))
            yield {"deterministic": is_deterministic, "gradients": len(first), "different": different}
        finally:
            torch.use_deterministic_algorithms(False)


@contextmanager
def _world_of_one(backend: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _step(subject: Subject, *, connects: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of a step of a tiny Omni, by name."""
    omni, is_cuda = Omni(num_steps=1), subject.device.type == "cuda"
    plan = make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=4)
    model = omni.build().to(torch.bfloat16 if is_cuda else torch.float32)
    rank = Rank(0, plan, omni.family, model, device="cuda:0" if is_cuda else "cpu")
    if connects:
        connect(rank.groups, plan, subject.device)
    batch = omni.batches[0]
    rank.reduce(rank.step(omni.source(batch), batch, make_step_plan(plan, batch, 0)))
    return {name: p.grad.clone() for name, p in rank.names.items() if p.grad is not None}
