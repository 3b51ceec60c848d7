"""Parameters, gradients and optimizer states shared out over a stage's replicas, by torch's FSDP2 (`fully_shard`).

A rank keeps its rows of every matrix, in float32 where it trains and in the model's type where it does not: the base of
adapters, the tower below a projector. A layer's weights are gathered when it runs, in the model's type, and let go of
behind it; gradients are summed, never averaged, and shared out in the backward pass of every microbatch, so
that no rank ever holds whole ones. All of that is collective, so replicas must run the same modules in the same
microbatches: `feed.py` gives those that have no work something to run. Where groups smaller than all replicas share
out parameters (HSDP), each group runs FSDP2 separately, and `reduce.py` all-reduces gradients over the copies after a
step. torch's HSDP keeps one flat sum per module, and fails where head and embedding are reduced apart. Ranks of a
tensor-parallel group share out their parts of matrices, each with the same rank of the other replicas.

Experts that replicas share (`parallel/experts.py`) are units of their own, shared out over the ranks with the same
ones. They are gathered once per step and their gradients summed in its last backward pass: weights and gradients of
1/ep of the experts are whole meanwhile, and no microbatch waits for messages of the largest part of the parameters.

To the rest of training such a stage looks like one of which every replica holds a part: `Stage.names` maps global names
to this rank's rows, plain tensors that share their memory with FSDP's. A frozen encoder stays whole: it has no backward
pass, after which FSDP2 forgets what ran. A frozen LLM that is shared out has one where any replica has media
(`feed.py`), as all replicas must, or none.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dflop.models.build import Stage
from dflop.models.generic.experts import experts_of
from dflop.models.generic.llm_stage import LlmStage
from dflop.parallel.part import Part, even_rows, rows_part
from dflop.parallel.topology import Groups


def shard_parameters(stages: Sequence[Stage], groups: Groups, cut: Mapping[str, Part]) -> dict[str, Part]:
    """Share stages out over replicas, in place, where the plan does; for stages on their device, set up to run.

    Args:
        stages: Of the rank.
        groups: Of the plan.
        cut: What the rank holds of parameters that tensor parallelism has cut.

    Returns:
        What this rank holds of every parameter that is shared out, by global name.
    """
    found: dict[str, Part] = {}
    if groups.shards is not None:
        # An LLM stage returns the only row of its batch; nothing writes into it.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view")
        for stage in stages:
            if isinstance(stage, LlmStage) or any(p.requires_grad for p in stage.names.values()):
                found |= _shard(stage, groups.shards, groups.same_experts or groups.shards, cut)
    return found


def _shard(
    stage: Stage, shards: dist.ProcessGroup, of_experts: dist.ProcessGroup, cut: Mapping[str, Part]
) -> dict[str, Part]:
    paths = {p: path for path, p in stage.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in stage.names.items()}
    where = {name: paths[p] for name, p in stage.names.items()}
    device = next(iter(stage.names.values())).device.type
    mesh = DeviceMesh.from_group(shards, device)
    policy = _in_float32([p for p in stage.names.values() if p.requires_grad])
    units, group_of = [], dict.fromkeys(where, shards)
    for layer in stage.run_alike:
        for experts in experts_of(layer) if of_experts is not shards else ():
            group_of |= {name: of_experts for name, p in stage.names.items() if p in set(experts.parameters())}
            among = DeviceMesh.from_group(of_experts, device)
            units.append(fully_shard(experts, mesh=among, mp_policy=policy, reshard_after_forward=False))
        units.append(fully_shard(layer, mesh=mesh, mp_policy=policy))
    # torch prefetches in the order of forward passes, which it forgets when a backward pass ends: in a pipeline, other
    # microbatches are in flight then, and their backward passes would wait for every layer's all-gather.
    for previous, unit in itertools.pairwise(units):
        unit.set_modules_to_backward_prefetch([previous])
    if of_experts is not shards:  # the host waits for tokens in every layer, and does not run ahead by itself
        ahead = [unit for layer in stage.run_alike for unit in (layer, *experts_of(layer))]
        for unit, following in itertools.pairwise(ahead):
            unit.set_modules_to_forward_prefetch([following])
    # What is outside the layers, an embedding or a head, is gathered once for all of its uses in a microbatch.
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for method in ("embed", "loss") if isinstance(stage, LlmStage) else ():
        register_fsdp_forward_method(stage, method)
    for module in sharded_modules(stage):
        # Both: gloo cannot scale while it sums.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    set_last_pass([stage], is_last=False)
    held = dict(stage.named_parameters())
    stage.shards = {name: held[path] for name, path in where.items()}
    stage.names |= {name: nn.Parameter(_rows(p), p.requires_grad) for name, p in stage.shards.items()}
    shares = {name: (group_of[name].size(), group_of[name].rank()) for name in shapes}
    return {name: rows_part(shape, even_rows(shape[0], *shares[name]), cut.get(name)) for name, shape in shapes.items()}


def _in_float32(parameters: Collection[nn.Parameter]) -> MixedPrecisionPolicy:
    """Turn parameters to float32; the policy that computes with them in the type they had."""
    dtype = next((p.dtype for p in parameters), torch.float32)
    if dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    for p in parameters:
        p.data = p.data.float()
    return MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)


def _rows(shard: torch.Tensor) -> torch.Tensor:
    assert isinstance(shard, DTensor)
    return shard.to_local().detach()


def sharded_modules(stage: nn.Module) -> Iterator[FSDPModule]:
    """The units of a stage that are gathered and shared out; none of one that is whole."""
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def set_last_pass(stages: Iterable[Stage], *, is_last: bool) -> None:
    """Whether experts' gradients are summed in the next backward pass, and their weights let go of behind it."""
    for layer in (layer for stage in stages for layer in stage.layers):
        for unit in (experts for experts in experts_of(layer) if isinstance(experts, FSDPModule)):
            unit.set_requires_gradient_sync(is_last)
            unit.set_reshard_after_backward(is_last)


def take_gradients(stages: Sequence[Stage]) -> None:
    """Hand the gradients of this rank's rows from FSDP to `Stage.names`."""
    set_last_pass(stages, is_last=False)
    for stage in stages:
        for name, shard in stage.shards.items():
            gradient, shard.grad = shard.grad, None
            stage.names[name].grad = None if gradient is None else _rows(gradient)
