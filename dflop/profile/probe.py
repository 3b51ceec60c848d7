"""Time forward and backward of one module at a shallow depth, exactly as the training stage runs it.

The probe uses the engine's own stage classes on random data of real shapes. Each visit to a group runs it once to warm
up, then repeats it; over all visits the median is kept with half the interquartile range beside it. Bytes that autograd
keeps alive are counted once per storage, parameters excluded. Two depths (2 and 4 layers by default) let the cost model
separate what a layer costs from what the ends cost, so that a module is never built at full depth just to be measured;
their repeats take turns, so that a machine that slows down slows both. A group that does not fit into memory is a row
that says so, and the probe goes on.

Tensor-parallel ranks probe together: each builds its part, all run the same groups in the same order, and seconds are
those of the wall, for waiting for the others is part of what such a layer costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.models import attention
from dflop.models.build import EncoderStage
from dflop.models.family import Family
from dflop.models.generic.llm_stage import LlmStage
from dflop.models.random_weights import RandomWeights
from dflop.models.ways import TRAIN, Way
from dflop.models.weights import build_empty
from dflop.parallel.compiled import EAGER
from dflop.parallel.stages import Piece, build_stages
from dflop.profile.groups import ProbeGroup, load_on
from dflop.profile.saved import saved_bytes
from dflop.profile.timing import CacheFlush, half_iqr, no_garbage_collection, optimizer_step_s, time_phases
from dflop.records import FP8_OFF, LLM, Measurement, MediaItem


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Where and how often to measure; the identifying strings end up in every row."""

    profile_key: str
    hardware: str
    software: str
    dtype: str
    num_repeats: int
    seed: int = 0
    attention: str = attention.AUTO
    """As `model.attention`."""
    compiler: str = EAGER
    """Compiler of every module's layers, as of `Piece`."""
    fp8: str = FP8_OFF
    """FP8 of the LLM's layers, as of `Piece`."""


class ModuleProbe:
    """One module at one depth, ready to be timed.

    Args:
        family: Family of the full model.
        token_config: Config entries that come from the tokenizer (token ids).
        module: Module to probe.
        num_layers: Depth to build.
        settings: Identification and repeats.
        device: Where to run.
        way: How the module is run.
        group: Ranks that share the module's layers; all of them run the same groups in the same order.
    """

    def __init__(
        self,
        family: Family,
        token_config: Mapping[str, Any],
        module: str,
        num_layers: int,
        settings: ProbeSettings,
        device: torch.device,
        way: Way = TRAIN,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._family = family.cut_to(module, num_layers)
        dtype, full = getattr(torch, settings.dtype), {**self._family.hf_config, **token_config}
        weights = RandomWeights(build_empty(self._family, full, dtype), settings.seed)
        compiler, fp8 = settings.compiler, settings.fp8 if module == LLM else FP8_OFF
        piece = Piece(module, (0, num_layers), way, compiler=compiler, fp8=fp8)
        (self._stage,), _ = build_stages(
            build_empty(self._family, full, dtype), self._family, [piece], device,
            kernel=attention.resolve(settings.attention, device.type, dtype), group=group, weights=weights,
        )  # fmt: skip
        self._way, self._group = way, group
        self._module, self._num_layers, self._settings, self._device = module, num_layers, settings, device
        self._dtype = dtype
        self._rng = np.random.default_rng(settings.seed)

    @cached_property
    def _flush(self) -> CacheFlush:
        return CacheFlush(self._device)

    @cached_property
    def _optimizer_s(self) -> float:
        """Behind any group's backward pass, which leaves gradients."""
        return optimizer_step_s(self._stage.names.values(), self._device, self._settings.num_repeats)

    def _start(self, group: ProbeGroup) -> tuple[Callable[[], torch.Tensor], _Run]:
        """A forward on new inputs, run once, and everything about the group but its seconds."""
        forward, device = self._prepare(group), self._device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        activation_bytes, output = saved_bytes(forward, self._stage.names.values())
        has_backward = output.requires_grad
        self._backward(output)  # the run that counts bytes is also the warm-up
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return forward, _Run(has_backward, activation_bytes, peak_bytes, [])

    def _repeat(self, forward: Callable[[], torch.Tensor], run: _Run) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)
        by_wall = self._group is not None
        run.timings.append(time_phases(forward, self._backward, self._device, flush=self._flush, by_wall=by_wall))

    def _finish(self, group: ProbeGroup, run: _Run) -> Measurement:
        forward_s = [forward for forward, _ in run.timings]
        backward_s = [backward if run.has_backward else 0.0 for _, backward in run.timings]
        return self._row(
            group, forward_s=statistics.median(forward_s), backward_s=statistics.median(backward_s),
            forward_spread_s=half_iqr(forward_s), backward_spread_s=half_iqr(backward_s), num_repeats=len(run.timings),
            activation_bytes=run.activation_bytes, peak_bytes=run.peak_bytes, optimizer_s=self._optimizer_s,
        )  # fmt: skip

    def _row(self, group: ProbeGroup, *, num_repeats: int, status: str = "ok", **measured: Any) -> Measurement:
        s, load = self._settings, load_on(self._family, self._module, group)
        tp = 1 if self._group is None else self._group.size()
        nothing = dict(forward_s=0.0, backward_s=0.0, forward_spread_s=0.0, backward_spread_s=0.0, activation_bytes=0)
        return Measurement(
            profile_key=s.profile_key, module=self._module, hardware=s.hardware, software=s.software, dtype=s.dtype,
            tp=tp, num_layers=self._num_layers, group=group.kind, num_items=load.num_items, num_tokens=load.num_tokens,
            sum_sq_tokens=load.sum_sq_tokens, num_repeats=num_repeats, param_bytes=self._stage.param_bytes,
            is_frozen=self._way.is_frozen, recompute=self._way.recompute, status=status,
            fp8=s.fp8 if self._module == LLM else FP8_OFF, **(nothing | measured),
        )  # fmt: skip

    def _free_after(self, error: Exception) -> None:
        """Give back what a group that did not fit had taken; other errors go on."""
        # A rank that gives up alone leaves the others waiting for it: then the job has to end.
        if self._group is not None or not is_out_of_memory(error):
            raise error
        # The frames of the failed run hold its tensors.
        error.__traceback__ = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, group: ProbeGroup) -> Callable[[], torch.Tensor]:
        if self._module == LLM:
            return self._prepare_llm(group)
        return self._prepare_encoder(group.items)

    def _prepare_encoder(self, items: Sequence[MediaItem]) -> Callable[[], torch.Tensor]:
        stage, family, axis = self._stage, self._family, self._family.towers[self._module].data_axis
        arrays = [self._array(item) for item in items]
        data = torch.from_numpy(np.concatenate(arrays, axis=axis)).to(self._device, self._dtype)
        sizes = torch.tensor([family.item_size(item) for item in items])
        assert isinstance(stage, EncoderStage)
        arithmetic = stage.arithmetic(sizes)
        return lambda: stage(data, sizes, arithmetic)

    def _array(self, item: MediaItem) -> np.ndarray:
        if (filler := self._family.filler(item)) is not None:
            return filler
        return self._rng.standard_normal(self._family.array_shape(self._module, item.grid), dtype=np.float32)

    def _prepare_llm(self, group: ProbeGroup) -> Callable[[], torch.Tensor]:
        stage, device = self._stage, self._device
        assert isinstance(stage, LlmStage)
        lengths = [s.num_llm_tokens for s in group.samples]
        vocab_size = self._family.configs[LLM]["vocab_size"]
        ids = torch.from_numpy(self._rng.integers(0, vocab_size, sum(lengths))).to(device)
        of_samples = [stage.positions(torch.zeros(n, dtype=torch.int64), []) for n in lengths]
        positions = torch.cat(of_samples, dim=1).to(device)
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        num_rows = sum(i.num_rows for s in group.samples for i in s.items)
        rows = torch.zeros(num_rows, stage.row_width, dtype=self._dtype, device=device)
        num_loss = sum(s.num_supervised_tokens for s in group.samples)
        where = torch.arange(num_loss, device=device) % sum(lengths)

        def forward() -> torch.Tensor:
            leaf = rows.detach().requires_grad_()
            hidden = stage.embed(ids, [leaf], [torch.arange(num_rows, device=device)])
            return stage.loss(stage(hidden, positions, cu_seqlens), where, ids[where])

        return forward

    def _backward(self, output: torch.Tensor) -> None:
        if output.requires_grad:  # nothing below a frozen encoder wants gradients
            torch.autograd.backward(output, torch.ones_like(output))


@dataclass(frozen=True, slots=True)
class _Run:
    """What is known of one group on one probe."""

    has_backward: bool
    activation_bytes: int
    peak_bytes: int
    timings: list[tuple[float, float]]


class GroupVisits:
    """One group on probes of several depths, whose repeats take turns; timed at one visit or at several.

    Args:
        probes: Of the same module.
        group: What all of them run.
    """

    def __init__(self, probes: Sequence[ModuleProbe], group: ProbeGroup) -> None:
        self._probes, self._group = probes, group
        self._runs: dict[ModuleProbe, _Run] = {}
        self._too_large: list[Measurement] = []

    def visit(self, num_repeats: int) -> None:
        """Run the group on new inputs, untimed, and then that many times; of a visit without repeats nothing is kept.

        Raises:
            RuntimeError: anything but a lack of memory; that, too, where tensor-parallel ranks probe together.
        """
        if is_first := not any(run.timings for run in self._runs.values()):
            self._runs.clear()
        forwards: dict[ModuleProbe, Callable[[], torch.Tensor]] = {}
        with no_garbage_collection():
            try:
                for probe in self._probes:
                    forwards[probe], run = probe._start(self._group)
                    self._runs.setdefault(probe, run)
                for _ in range(num_repeats):
                    for probe, forward in forwards.items():
                        probe._repeat(forward, self._runs[probe])
            except (MemoryError, RuntimeError) as error:
                probe._free_after(error)
                if is_first:  # what fitted once has its rows
                    self._too_large = [probe._row(self._group, num_repeats=0, status="oom")]

    @property
    def fits(self) -> bool:
        """Whether the group has fitted at every depth."""
        return not self._too_large

    def rows(self) -> list[Measurement]:
        """One per probe, the medians of all visits; they end with status `oom` at the first where it does not fit."""
        return [probe._finish(self._group, run) for probe, run in self._runs.items() if run.timings] + self._too_large


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out: CUDA has a type of its own, torch's CPU allocator only words."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error) or "not enough memory" in str(error)
