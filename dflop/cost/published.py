"""How sure the seconds of a plan by a data sheet are: the nearest published training, and how far its kind is off.

Errors are predicted over published seconds less one, by a fit that saw no run of the laboratory (docs/appendix.md has
all 88; the tests compare). They are those of language models, whole steps of them; a plan with towers has their error
on top, and no run has ranks that share samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dflop import units
from dflop.cost.devices import Device
from dflop.records import ModuleSpec, ParallelSpec


class Degrees(Protocol):
    """Degrees of a layout."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...


class PublishedRun(NamedTuple):
    """A training as its authors ran it."""

    model: str
    num_params: float
    device: str
    """Beginning of the device's name."""
    num_gpus: int
    tp: int
    pp: int
    laboratory: str
    error_frac: float

    @property
    def text(self) -> str:
        degrees = f", tp {self.tp}" * (self.tp > 1) + f", pp {self.pp}" * (self.pp > 1)
        return (
            f"{self.model} on {self.num_gpus} {self.device}{degrees} ({self.laboratory}), seconds off by "
            f"{100 * self.error_frac:+.0f} %"
        )


RUNS = (
    PublishedRun("mpt-1b", 1.3e9, "A100", 8, 1, 1, "mosaicml/llm-foundry", 0.042),
    PublishedRun("mpt-7b", 6.6e9, "A100", 8, 1, 1, "mosaicml/llm-foundry", 0.003),
    PublishedRun("llama-2-13b", 13e9, "A100", 64, 1, 1, "pytorch/torchtitan", -0.092),
    PublishedRun("mpt-30b", 30e9, "A100", 8, 1, 1, "mosaicml/llm-foundry", 0.085),
    PublishedRun("llama-2-70b", 69e9, "A100", 64, 1, 1, "pytorch/torchtitan", -0.074),
    PublishedRun("qwen2.5-14b", 14.8e9, "A800", 8, 1, 1, "modelscope/ms-swift", 0.043),
    PublishedRun("qwen2.5-14b", 14.8e9, "A800", 8, 4, 1, "modelscope/ms-swift", 0.018),
    PublishedRun("mpt-1b", 1.3e9, "H100", 64, 1, 1, "mosaicml/llm-foundry", 0.038),
    PublishedRun("llama-2-7b", 6.7e9, "H100", 96, 1, 1, "foundation-model-stack/fms-fsdp", -0.036),
    PublishedRun("llama-2-13b", 13e9, "H100", 96, 1, 1, "foundation-model-stack/fms-fsdp", -0.121),
    PublishedRun("llama-2-34b", 33.7e9, "H100", 96, 1, 1, "foundation-model-stack/fms-fsdp", -0.067),
    PublishedRun("llama-2-70b", 69e9, "H100", 96, 1, 1, "foundation-model-stack/fms-fsdp", -0.096),
    PublishedRun("llama-3-8b", 8e9, "H100", 64, 8, 1, "pytorch/torchtitan", -0.087),
    PublishedRun("llama-3-70b", 70.6e9, "H100", 256, 8, 1, "pytorch/torchtitan", -0.001),
    PublishedRun("llama-3-8b", 8e9, "H200", 64, 1, 1, "crusoecloud/torchtitan", 0.009),
    PublishedRun("llama-13b-kempner", 14.8e9, "H200", 8, 1, 1, "KempnerInstitute/KempnerForge", -0.03),
    PublishedRun("llama-3-8b", 8e9, "H200", 4, 2, 1, "KempnerInstitute/KempnerForge", 0.026),
    PublishedRun("llama-3-70b", 70.6e9, "H200", 32, 4, 1, "KempnerInstitute/KempnerForge", 0.018),
    PublishedRun("llama-13b-kempner", 14.8e9, "H200", 32, 4, 2, "KempnerInstitute/KempnerForge", -0.121),
    PublishedRun("llama-3-70b", 70.6e9, "H200", 32, 4, 4, "KempnerInstitute/KempnerForge", -0.084),
    PublishedRun("llama-3-8b", 8e9, "B200", 8, 1, 1, "crusoecloud/torchtitan", -0.078),
)
"""One of each device, size and kind of layout."""
RANGES: Mapping[str, tuple[int, float]] = {
    "replicas": (74, 0.096),
    "tensor parallelism": (12, 0.092),
    "pipelines": (2, 0.117),
}
"""By kind of layout: runs, and the error that nine of ten keep to."""
NEAR_RATIO = 2.0
"""Most ratio of parameters; a run of another kind of layout or device is not near."""


def kind_of(parallel: Degrees) -> str:
    """Kind of a layout, as in `RANGES`."""
    if parallel.pp > 1:
        return "pipelines"
    return "tensor parallelism" if parallel.tp > 1 else "replicas"


def certainty(llm: ModuleSpec, parallel: ParallelSpec, device: Device, step_s: float) -> tuple[str, str]:
    """(range of a step's seconds, what it is from: the kind of layout, and the nearest published run).

    Args:
        llm: The language model.
        parallel: Its layout.
        device: Whose data sheet the costs are of.
        step_s: As planned.
    """
    kind = kind_of(parallel)
    num_runs, frac = RANGES[kind]
    near = [run for run in RUNS if kind_of(run) == kind and device.name.startswith(run.device)]
    away = {run: abs(math.log(run.num_params / llm.num_params)) for run in near}
    nearest = min(away, key=lambda run: away[run], default=None)
    text = f"of published language models with {kind} ({num_runs} runs) nine of ten are predicted within "
    text += f"{units.percent(frac)}; "
    if parallel.cp > 1:
        text += "none of them has ranks that share samples; "
    is_near = nearest is not None and away[nearest] <= math.log(NEAR_RATIO)
    text += f"nearest: {nearest.text}" if nearest and is_near else "none of this size and device is near"
    return f"{units.seconds(step_s / (1 + frac))} to {units.seconds(step_s / (1 - frac))}", text
