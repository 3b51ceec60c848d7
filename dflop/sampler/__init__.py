"""What any PyTorch trainer can use by itself: balanced batches and exact losses, nothing else to adopt."""

from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.check import LossCheck, check_loss_scaling
from dflop.sampler.costs import SampleCosts, sample_costs, sample_costs_from_store, sample_costs_from_tables
from dflop.sampler.loss import loss_scale
from dflop.sampler.plans import BatchPlan
from dflop.sampler.steps import Step, sum_over_ranks

__all__ = [
    "BalancedBatchSampler",
    "BatchPlan",
    "LossCheck",
    "SampleCosts",
    "Step",
    "check_loss_scaling",
    "loss_scale",
    "sample_costs",
    "sample_costs_from_store",
    "sample_costs_from_tables",
    "sum_over_ranks",
]
