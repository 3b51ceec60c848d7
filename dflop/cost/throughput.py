"""What practitioners compare trainings by: tokens/s/GPU, utilisation, and what an epoch takes.

Utilisation is that of PaLM (arXiv 2204.02311, appendix B): the FLOPs that the model needs over what the devices could
do. Recomputation is no progress and counts in the hardware FLOPs utilisation (HFU) alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflop.cost.flops import FlopCounter
from dflop.records import ModuleSpec, Plan, SampleShape


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput of steps of one length; simulated where the length is."""

    tokens_per_s_per_gpu: float
    """Tokens of the LLM, media among them; every GPU that is paid for counts."""
    samples_per_s: float
    mfu_frac: float
    """NaN where the peak of the device is not known."""
    hfu_frac: float
    epoch_gpu_hours: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Global batches of a model on a cluster."""

    specs: Sequence[ModuleSpec]
    frozen: Sequence[str]
    """Modules whose weights take no gradients, or `<encoder>.tower`s."""
    batches: Sequence[Sequence[SampleShape]]
    num_gpus: int
    """GPUs of the cluster, whether a plan uses all of them or not."""
    peak_flops_per_s: float
    """Peak of one GPU; NaN where it is not known."""
    num_samples: int
    """Samples of an epoch."""
    adapted: Sequence[str] = ()
    """Modules of which low-rank adapters train."""

    def throughput(self, step_s: float, plan: Plan | None) -> Throughput:
        """What a mean step time on the batches means; without a plan nothing is taken to recompute.

        Where microbatches differ in how many layers run again, all are taken to be as large as the mean one.
        """
        counter = FlopCounter(self.specs, self.frozen, self.adapted)
        flops = math.fsum(counter.count(batch) for batch in self.batches)
        again = (
            0.0
            if plan is None
            else math.fsum(
                m.recomputed_frac(
                    num_tokens=sum(s.num_llm_tokens for s in batch) / (plan.num_microbatches * m.parallel.dp)
                )
                * counter.count_again(batch, [m.module])
                for m in plan.modules
                if m.recompute
                for batch in self.batches
            )
        )
        total_s = step_s * len(self.batches)
        peak_flops = total_s * self.num_gpus * self.peak_flops_per_s
        num_tokens = sum(shape.num_llm_tokens for batch in self.batches for shape in batch)
        samples_per_s = sum(map(len, self.batches)) / total_s
        return Throughput(
            tokens_per_s_per_gpu=num_tokens / total_s / self.num_gpus,
            samples_per_s=samples_per_s,
            mfu_frac=flops / peak_flops,
            hfu_frac=(flops + again) / peak_flops,
            epoch_gpu_hours=self.num_samples / samples_per_s * self.num_gpus / 3600,
        )
