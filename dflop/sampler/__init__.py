"""What any PyTorch trainer can use by itself: balanced batches and exact losses, nothing else to adopt.

A torch batch sampler, costs from a function, a model's files or a store, and the loss scaling that uneven microbatches
need; `dflop.sampler.hf` has a class in place of Hugging Face's Trainer. Every rank makes the same plan for itself:
global batches are a function of (seed, epoch, step), and dealing out counts in integers, so that all machines agree.
Names are imported when they are used: `dflop sampler estimate` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.sampler.accumulation import Step, loss_scale, sum_over_ranks
    from dflop.sampler.batch_sampler import BalancedBatchSampler
    from dflop.sampler.costs_of_media import media_costs
    from dflop.sampler.costs_of_samples import (
        SampleCosts,
        sample_costs,
        sample_costs_from_store,
        sample_costs_from_tables,
    )
    from dflop.sampler.gradient_check import LossCheck, check_loss_scaling
    from dflop.sampler.lengths import lengths_of
    from dflop.sampler.rank_plans import BatchPlan

__all__ = [
    "BalancedBatchSampler", "BatchPlan", "LossCheck", "SampleCosts", "Step", "check_loss_scaling", "lengths_of",
    "loss_scale", "media_costs", "sample_costs", "sample_costs_from_store", "sample_costs_from_tables",
    "sum_over_ranks",
]  # fmt: skip
_MODULES = {
    "accumulation": ("Step", "loss_scale", "sum_over_ranks"),
    "batch_sampler": ("BalancedBatchSampler",),
    "costs_of_media": ("media_costs",),
    "costs_of_samples": ("SampleCosts", "sample_costs", "sample_costs_from_store", "sample_costs_from_tables"),
    "gradient_check": ("LossCheck", "check_loss_scaling"),
    "lengths": ("lengths_of",),
    "rank_plans": ("BatchPlan",),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module `dflop.sampler` has no `{name}`")
    return getattr(importlib.import_module(f"dflop.sampler.{module}"), name)
