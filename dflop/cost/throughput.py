"""What practitioners compare trainings by: tokens/s/GPU, utilisation, and what an epoch takes.

Utilisation is that of PaLM (arXiv 2204.02311, appendix B): the FLOPs that the model needs over what the devices could
do. Recomputation is no progress and counts in the hardware FLOPs utilisation (HFU) alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dflop.cost.flops import FlopCounter
from dflop.records import SampleShape


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of steps of one length; simulated where the length is."""

    tokens_per_s_per_gpu: float
    """Tokens of the LLM, media among them; every GPU that is paid for counts."""
    samples_per_s: float
    mfu_frac: float
    """NaN where the peak of the device is not known."""
    hfu_frac: float
    epoch_gpu_hours: float

    def epoch_cost(self, price_per_gpu_hour: float) -> float:
        """Money for an epoch, in the currency of the price."""
        return self.epoch_gpu_hours * price_per_gpu_hour


def throughput(
    step_s: float,
    batches: Sequence[Sequence[SampleShape]],
    counter: FlopCounter,
    *,
    num_gpus: int,
    peak_flops_per_s: float,
    recomputed: Collection[str],
    num_samples: int,
) -> Throughput:
    """What a step time means.

    Args:
        step_s: Mean seconds of a step on `batches`.
        batches: Global batches of one size.
        counter: Of the model.
        num_gpus: GPUs of the cluster, whether all of them work or not.
        peak_flops_per_s: Of one GPU; NaN where it is not known.
        recomputed: Modules whose layers run their forward pass twice.
        num_samples: Of an epoch.
    """
    flops = [counter.count(batch) for batch in batches]
    again = [counter.count_again(batch, recomputed) for batch in batches]
    total_s, peak = step_s * len(batches), num_gpus * peak_flops_per_s
    num_tokens = sum(shape.num_llm_tokens for batch in batches for shape in batch)
    samples_per_s = sum(len(batch) for batch in batches) / total_s
    return Throughput(
        tokens_per_s_per_gpu=num_tokens / total_s / num_gpus,
        samples_per_s=samples_per_s,
        mfu_frac=math.fsum(flops) / total_s / peak,
        hfu_frac=(math.fsum(flops) + math.fsum(again)) / total_s / peak,
        epoch_gpu_hours=num_samples / samples_per_s * num_gpus / 3600,
    )
