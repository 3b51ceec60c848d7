"""Time forward and backward of one module at a shallow depth, exactly as the training stage runs it.

The probe uses the engine's own stage classes on random data of real shapes. Each group is run once to warm up, then
repeated; the median is kept with half the interquartile range beside it. Bytes that autograd keeps alive are counted
once per storage, parameters excluded. Two depths (1 and 2 layers by default) let the cost model separate what a layer
costs from what the ends cost, so that a module is never built at full depth just to be measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflop.models import load_family
from dflop.models.build import EncoderStage, LlmStage, Stage, build_model, cut_stage
from dflop.models.family import Family
from dflop.profile.groups import ProbeGroup
from dflop.records import LLM, Measurement


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Where and how often to measure; the identifying strings end up in every row."""

    profile_key: str
    hardware: str
    software: str
    dtype: str
    num_repeats: int
    seed: int = 0


class ModuleProbe:
    """One module at one depth, ready to be timed.

    Args:
        family: Family of the full model.
        token_config: Config entries that come from the tokenizer (token ids).
        vocab_size: Rows of the embedding.
        module: Module to probe.
        num_layers: Depth to build.
        settings: Identification and repeats.
        device: Where to run.
    """

    def __init__(
        self,
        family: Family,
        token_config: Mapping[str, Any],
        vocab_size: int,
        module: str,
        num_layers: int,
        settings: ProbeSettings,
        device: torch.device,
    ) -> None:
        config = family.shallow(module, num_layers)
        self._family = load_family(family.name, config, family.media)
        dtype = getattr(torch, settings.dtype)
        model = build_model(self._family, {**config, **token_config}, seed=settings.seed, dtype=dtype)
        self._stage: Stage = cut_stage(model, self._family, module, (0, num_layers)).to(device)
        self._module, self._num_layers, self._settings, self._device = module, num_layers, settings, device
        self._vocab_size, self._dtype = vocab_size, dtype
        self._rng = np.random.default_rng(settings.seed)

    def measure(self, group: ProbeGroup) -> Measurement:
        """Median forward and backward seconds and saved bytes of one packed group."""
        forward, self._load = self._prepare(group)
        activation_bytes = self._saved_bytes(forward)
        timings = [self._time_once(forward) for _ in range(self._settings.num_repeats)]
        forward_s, backward_s = zip(*timings, strict=True)
        s = self._settings
        return Measurement(
            profile_key=s.profile_key, module=self._module, hardware=s.hardware, software=s.software, dtype=s.dtype,
            tp=1, num_layers=self._num_layers, group=group.kind, num_items=self._load[0], num_tokens=self._load[1],
            sum_sq_tokens=self._load[2], forward_s=statistics.median(forward_s),
            backward_s=statistics.median(backward_s), forward_spread_s=_half_iqr(forward_s),
            backward_spread_s=_half_iqr(backward_s), num_repeats=s.num_repeats, param_bytes=self._stage.param_bytes,
            activation_bytes=activation_bytes,
        )  # fmt: skip

    def _prepare(self, group: ProbeGroup) -> tuple[Callable[[], torch.Tensor], tuple[int, int, int]]:
        if self._module == LLM:
            load = (group.load.num_items, group.load.num_tokens, group.load.sum_sq_tokens)
            return self._prepare_llm(group), load
        # The shallow probe's own rule: its layers may mix full and windowed attention differently.
        placed = [
            self._family.place(
                item.kind,
                width_px=item.width_px,
                height_px=item.height_px,
                num_frames=item.num_frames,
                duration_s=item.duration_s,
            )
            for item in group.items
        ]
        load = (len(placed), sum(p.num_tokens for p in placed), sum(p.sum_sq_tokens for p in placed))
        return self._prepare_encoder([p.grid for p in placed]), load

    def _prepare_encoder(self, grids: list[tuple[int, int, int]]) -> Callable[[], torch.Tensor]:
        stage, axis = self._stage, self._family.towers[self._module].data_axis
        arrays = [self._rng.standard_normal(self._family.array_shape(self._module, g), dtype=np.float32) for g in grids]
        data = torch.from_numpy(np.concatenate(arrays, axis=axis)).to(self._device, self._dtype)
        sizes = torch.tensor(grids, device=self._device)
        assert isinstance(stage, EncoderStage)
        return lambda: stage(data, sizes)

    def _prepare_llm(self, group: ProbeGroup) -> Callable[[], torch.Tensor]:
        stage, device = self._stage, self._device
        assert isinstance(stage, LlmStage)
        lengths = [s.num_llm_tokens for s in group.samples]
        ids = torch.from_numpy(self._rng.integers(0, self._vocab_size, sum(lengths))).to(device)
        positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1).to(device)
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        num_rows = sum(i.num_rows for s in group.samples for i in s.items)
        rows = torch.zeros(num_rows, stage.decoder.config.hidden_size, dtype=self._dtype, device=device)
        num_loss = sum(s.num_supervised_tokens for s in group.samples)
        where = torch.arange(num_loss, device=device) % sum(lengths)

        def forward() -> torch.Tensor:
            leaf = rows.detach().requires_grad_()
            hidden = stage.embed(ids, [leaf], [torch.arange(num_rows, device=device)])
            return stage.loss_sum(stage(hidden, positions, cu_seqlens), where, ids[where])

        return forward

    def _saved_bytes(self, forward: Callable[[], torch.Tensor]) -> int:
        own = {p.untyped_storage().data_ptr() for p in self._stage.names.values()}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward()
        self._backward(output)  # also the warm-up
        return sum(storages.values())

    def _time_once(self, forward: Callable[[], torch.Tensor]) -> tuple[float, float]:
        started = self._clock()
        output = forward()
        computed = self._clock()
        self._backward(output)
        return computed - started, self._clock() - computed

    def _backward(self, output: torch.Tensor) -> None:
        torch.autograd.backward(output, torch.ones_like(output))

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return time.perf_counter()
        # CPU time of this thread: another process on the core must not look like a slow shape.
        return time.thread_time()


def _half_iqr(values: tuple[float, ...]) -> float:
    return float(np.subtract(*np.percentile(values, [75, 25]))) / 2
