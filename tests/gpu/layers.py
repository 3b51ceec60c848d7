"""What single layers and kernels take on a GPU, beside what the data sheet predicts: parts of `evidence`."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq
import torch

from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.devices import H100, Device, find_device
from dflop.cost.model import CostModel
from dflop.errors import ConfigError
from dflop.models import attention, load_family
from dflop.models.family import Family
from dflop.models.loss import head_loss
from dflop.models.ways import WAYS
from dflop.profile.groups import ProbeGroup, probe_groups
from dflop.profile.probe import ModuleProbe
from dflop.profile.profiler import profile_model
from dflop.profile.timing import time_phases
from dflop.records import LLM, Measurement, ModuleSpec
from dflop.store import schema
from tests.gpu.drawn import make_shapes, settings_of, token_config
from tests.gpu.subject import Subject
from tests.profile.measuring import measure

HEADS = {
    "qwen2.5-7b": (28, 4, 128, True), "siglip-so400m": (16, 16, 72, False), "internvit-300m": (16, 16, 64, False),
}  # fmt: skip
"""(heads of queries, of keys, head_dim, causal)."""
PACKINGS = {"one of 16384": [16384], "8 of 2048": [2048] * 8, "16 of 1024": [1024] * 16, "64 of 256": [256] * 64,
            "uneven": [6000, 3000, 2500, 1800, 1200, 800, 500, 300, 200, 84]}  # fmt: skip
MATMULS = {"qwen2.5-7b mlp": (3584, 18944), "qwen2.5-7b query": (3584, 3584), "siglip mlp": (1152, 4304),
           "internvit mlp": (1024, 4096)}  # fmt: skip
NUM_REPEATS = 5


def seconds(subject: Subject, forward: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Median (forward_s, backward_s), the first two runs left out."""

    def backward(output: torch.Tensor) -> None:
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))

    runs = [time_phases(forward, backward, subject.device) for _ in range(2 + NUM_REPEATS)][2:]
    return statistics.median(f for f, _ in runs), statistics.median(b for _, b in runs)


def attention_kernels(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Every kernel on every kind of head and packing: seconds, forward FLOP/s, distance from SDPA's values."""
    for name, heads in HEADS.items():
        for packing, real_lengths in PACKINGS.items():
            lengths = [subject.size(n, max(1, n // 200)) for n in real_lengths]
            for row in kernels_on(subject, *heads, lengths):
                yield {"heads": name, "packing": packing, **row}
            if time.monotonic() > deadline_s:
                return


def kernels_on(
    subject: Subject, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool, lengths: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    """A row per kernel; one that cannot run says why."""
    dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, sum(lengths), head_dim, device=subject.device, dtype=dtype, requires_grad=True)
        for h in (num_heads, num_kv_heads, num_kv_heads)
    )
    cu = torch.tensor([0, *lengths], device=subject.device).cumsum(0).to(torch.int32)
    flops = (2.0 if causal else 4.0) * sum(n * n for n in lengths) * num_heads * head_dim

    def forward(kernel: str) -> torch.Tensor:
        return attention.packed_attention(
            torch.nn.Module(), q, k, v, None, is_causal=causal, cu_seq_lens_q=cu, kernel=kernel,
            max_length_q=max(lengths),
        )[0]  # fmt: skip

    exact = forward(attention.SDPA).detach().float()
    for kernel in (attention.SDPA, attention.VARLEN, attention.FLASH):
        try:
            attention.resolve(kernel, subject.device.type, dtype)
        except ConfigError as error:
            yield {"kernel": kernel, "missing": error.what}
            continue
        error = float((forward(kernel).detach().float() - exact).abs().max())
        forward_s, backward_s = seconds(subject, functools.partial(forward, kernel))
        yield {
            "kernel": kernel, "forward_s": forward_s, "backward_s": backward_s,
            "forward_flops_per_s": flops / forward_s, "backward_over_forward": backward_s / forward_s,
            "max_error": error,
        }  # fmt: skip


def roofline(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Matrix products by number of rows, a copy, an eager RMSNorm, and a small kernel launched many times."""
    dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
    for name, (width, out_width) in MATMULS.items():
        weight = torch.randn(out_width, width, device=subject.device, dtype=dtype)
        for real_rows in (256, 1024, 4096, 16384):
            x = torch.randn(subject.size(real_rows, 2), width, device=subject.device, dtype=dtype)
            took_s = seconds(subject, lambda x=x, w=weight: torch.nn.functional.linear(x, w))[0]
            yield {"matmul": name, "rows": len(x), "seconds": took_s, "flops_per_s": 2 * x.numel() * out_width / took_s}
    x = torch.randn(subject.size(16384, 16), 3584, device=subject.device, dtype=dtype)
    took_s = seconds(subject, lambda: x.clone())[0]
    yield {"copy": "clone", "seconds": took_s, "bytes_per_s": 2 * x.nbytes / took_s}
    weight = torch.ones(3584, device=subject.device, dtype=dtype)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "fused": lambda: torch.nn.functional.rms_norm(x, (3584,), weight, 1e-6),
        "eager": lambda: weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype),
    }
    for way, norm in ways.items():
        took_s = seconds(subject, norm)[0]
        yield {"rms_norm": way, "seconds": took_s, "times_read_and_written": took_s * 3e12 / (2 * x.nbytes)}
    small = torch.ones(8, device=subject.device)

    def launches() -> torch.Tensor:
        for _ in range(1000):
            small.add_(1.0)
        return small

    started_s = time.perf_counter()
    took_s = seconds(subject, launches)[0]
    wall_s = (time.perf_counter() - started_s) / (2 + NUM_REPEATS)
    yield {"launch": "add_", "seconds": took_s / 1000, "wall_s": wall_s / 1000}


def tables(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Measured layers beside the data sheet's; files of `Measurement` rows for a replay."""
    todo = [(name, model, m) for name, (model, modules) in subject.tables.items() for m in modules]
    for index, (name, model, module) in enumerate(todo):
        share_s = (deadline_s - time.monotonic()) / (len(todo) - index)
        if share_s <= 0:
            return
        family, rows = probed(subject, name, model, module, 0.7 * share_s)
        pq.write_table(schema.to_table(Measurement, rows), subject.folder / f"{name}.{module}.parquet")
        yield from beside_data_sheet(rows, family.specs())


def probed(
    subject: Subject, name: str, model: Mapping[str, Any], module: str, budget_s: float
) -> tuple[Family, list[Measurement]]:
    """Measurements of a module at one and two layers; no encoder needs a vocabulary."""
    model = model if module == LLM else with_small_vocabulary(model)
    family = load_family(model["family"], model["hf_config"], model.get("media", {}))
    return family, list(profile_model(
        family, make_shapes(family, 400, seed=0), token_config=token_config(family),
        settings=settings_of(name, model, subject.device),
        depths=(1, 2), num_probes=14, max_samples=subject.size(16, 6), budget_s=budget_s, device=subject.device,
        progress=lambda line: None, ways=[WAYS["train"]], only=module,
    ))  # fmt: skip


def with_small_vocabulary(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model without most of its embedding, which takes seconds to make and which no encoder uses."""
    config = model["hf_config"]
    key = "text_config" if "text_config" in config else "llm_config"
    return {**model, "hf_config": {**config, key: {**config[key], "vocab_size": 1000}}}


def sheet_of(hardware: str) -> Device:
    """The data sheet of a device, by `hardware_name`; of an H100 where it has none, a CPU for one."""
    try:
        return find_device(hardware)
    except ConfigError:
        return H100


def beside_data_sheet(rows: Sequence[Measurement], specs: Sequence[ModuleSpec]) -> Iterator[Mapping[str, Any]]:
    """Each measurement that fitted into memory, and what the data sheet's tables say of the same load."""
    device = sheet_of(rows[0].hardware)
    cost = CostModel(analytic_cost_tables(specs, device, profile_key=""), extrapolate=True)
    for row in rows:
        kept = ("profile_key", "module", "num_layers", "num_items", "num_tokens", "sum_sq_tokens", "status",
                "forward_s", "backward_s", "activation_bytes", "peak_bytes", "param_bytes", "optimizer_s")  # fmt: skip
        measured = {name: value for name, value in dataclasses.asdict(row).items() if name in kept}
        load = (row.num_items, row.num_tokens, row.sum_sq_tokens)
        forward_s, backward_s = cost.module_seconds(row.module, load, num_layers=row.num_layers, edge=True)
        num_bytes = cost.activation_bytes(row.module, load, num_layers=row.num_layers, edge=True)
        yield {
            **measured, "sheet": device.name, "sheet_forward_s": float(forward_s),
            "sheet_backward_s": float(backward_s), "sheet_activation_bytes": float(num_bytes),
        }  # fmt: skip


def memory(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Seconds and peak of the loss per logit, and what two depths of the trained model keep, recomputed or not."""
    width, vocab_size = subject.size(1536, 16), subject.size(151_936, 500)
    dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
    head = torch.nn.Linear(width, vocab_size, bias=False, device=subject.device, dtype=dtype)
    head.weight.grad_dtype = torch.float32

    losses: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "at once": lambda x, targets: torch.nn.functional.cross_entropy(head(x).float(), targets, reduction="sum"),
        "in chunks": lambda x, targets: head_loss(x, head.weight, None, targets, 1),
    }
    for real_tokens in (1024, 4096, 8192):
        x = torch.randn(subject.size(real_tokens, 8), width, device=subject.device, dtype=dtype, requires_grad=True)
        targets = torch.zeros(len(x), dtype=torch.long, device=subject.device)
        for way, loss in losses.items():
            forward = functools.partial(loss, x, targets)
            took_s = sum(seconds(subject, forward))
            peak = peak_bytes(subject, lambda forward=forward: forward().backward()) / (len(x) * vocab_size)
            yield {"loss": way, "loss_tokens": len(x), "peak_bytes_per_logit": peak, "seconds": took_s}
    model = with_small_vocabulary(subject.whole)
    family = load_family(model["family"], model["hf_config"], model.get("media", {}))
    settings = settings_of("whole", model, subject.device)
    for way in ("train", "recompute"):
        for module in family.modules:
            groups: Sequence[ProbeGroup] = probe_groups(
                make_shapes(family, 100, seed=2), module, num_groups=2, max_samples=subject.size(12, 2), seed=0
            )
            for num_layers in (2, 4) if not subject.is_tiny else (1, 2):
                if time.monotonic() > deadline_s:
                    return
                probe = ModuleProbe(
                    family, token_config(family), module, num_layers, settings, subject.device, way=WAYS[way]
                )
                rows = [measure(probe, group, settings.num_repeats) for group in groups]
                for row in beside_data_sheet(rows, family.specs()):
                    yield {"way": way, **row}


def peak_bytes(subject: Subject, run: Callable[[], None]) -> int:
    """Bytes that a run has allocated at its peak, beyond what was there before; 0 on a CPU."""
    run()
    if subject.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
