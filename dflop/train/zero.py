"""ZeRO-1 (arXiv 1910.02054): data-parallel replicas share out the optimizer's states, each owning whole parameters.

Of an embedding or a head, of which one has more than a replica's share of a model, several own even parts of the rows;
matrices in between stay whole, as Muon updates them whole. Gradients are summed to the owner alone, and what it makes
of the weights goes back to the others: as many bytes on the way as one all-reduce.

They go as in Megatron's distributed optimizer with `overlap_param_gather`: weights are views of flat buffers, which
owners begin to send right behind the update, in the order of the forward pass, and each layer of the next forward pass
waits for its own; what is not hidden by then counts as that layer's time. Who reads weights otherwise waits for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from dflop.models.build import EncoderStage, Stage
from dflop.models.generic.llm_stage import LlmStage
from dflop.parallel.topology import Groups, Seat
from dflop.records import Plan
from dflop.train.buckets import Bucket, Owners, Rows, grouped, num_owners, of_owners, owned_rows

_ALIGNED = 64
"""Elements between whose multiples a parameter begins: kernels are chosen by where their input lies."""


def owners_of(plan: Plan, seat: Seat, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Owners of a seat's trained parameters, equal on all replicas of its stage; none of what they hold rows of.

    The largest parameter goes first and always to whoever has least, so no replica has more than the mean and one
    parameter, or one's part of it. Each part of shared experts has its owner among the replicas that hold that part.

    Args:
        plan: Says which modules share out their optimizer.
        seat: Any of the replicas.
        stages: Its parts.
    """
    parallel = plan.module(seat.module).parallel
    num_replicas = parallel.num_replicas
    trained = {
        name: (p, parallel.ep if name in stage.of_experts else 1)
        for part, stage in zip(seat.parts, stages, strict=True)
        if plan.module(part.module).shard_optimizer and num_replicas > 1 and not stage.shards
        for name, p in stage.names.items()
        if p.requires_grad
    }
    owners, loads = {}, [0] * num_replicas
    for name in sorted(trained, key=lambda name: (-trained[name][0].numel(), name)):
        p, each = trained[name]
        most = [max(loads[first : first + each]) for first in range(0, num_replicas, each)]
        num = 1 if each > 1 else num_owners(name, p, num_replicas)
        owners[name] = tuple(sorted(range(len(most)), key=most.__getitem__)[:num])
        for replica in (n for owner in owners[name] for n in range(each * owner, each * (owner + 1))):
            loads[replica] += p.numel() // num
    return owners


def those_apart(stages: Sequence[Stage], groups: Groups) -> dict[str, dist.ProcessGroup]:
    """Parameters of experts that replicas share, with the replicas that have the same."""
    if groups.same_experts is None:
        return {}
    return {name: groups.same_experts for stage in stages for name in stage.of_experts}


class SharedWeights:
    """Weights that their owners update and send to all replicas.

    Args:
        stages: Of a seat; from now on the weights are views of flat buffers, and what reads them waits for them.
        owners: Of all parameters that the replicas share out, the same on every replica.
        replicas: Who shares them out.
        apart: As for `GradientBuckets`.
    """

    def __init__(
        self, stages: Sequence[Stage], owners: Owners, replicas: dist.ProcessGroup,
        apart: Mapping[str, dist.ProcessGroup] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.owners, self._replicas, self._apart = owners, replicas, apart
        names = {p: name for stage in stages for name, p in stage.names.items() if name in owners}
        reads = [(module, [p for p in read if p in names]) for stage in stages for module, read in _readers(stage)]
        forward = dict.fromkeys(p for _, read in reads for p in read)
        assert len(forward) == len(owners), "every weight has a reader"
        self._buckets: list[Bucket] = []
        buckets_of: dict[nn.Parameter, list[Bucket]] = {}
        # Grouped as gradients are, so that what comes first in a forward pass is last.
        for (among, owned), members in reversed(grouped({names[p]: p for p in reversed(forward)}, owners, apart)):
            parts = of_owners(_flattened(members), members, owned)
            made = [Bucket(part, owner, among or replicas) for part, owner in parts]
            self._buckets += made
            buckets_of |= dict.fromkeys(members, made)
        for module, read in reads:
            buckets = dict.fromkeys(bucket for p in read for bucket in buckets_of[p])
            # Its own weights are there already.
            missing = [bucket for bucket in buckets if bucket.among and bucket.owner != bucket.among.rank()]
            module.register_forward_pre_hook(lambda *_, missing=missing: _wait(missing))

    def rows(self, name: str, p: torch.Tensor) -> Rows | None:
        """What this rank updates of a parameter, all of it where replicas do not share it out; None: nothing."""
        own = self._apart.get(name, self._replicas).rank()
        return owned_rows(p, self.owners.get(name, (own,)), own)

    def send(self) -> None:
        """Begin to give every replica the weights of their owners; call `wait` before these change again."""
        for bucket in (b for b in self._buckets if b.among and b.among.size() > 1):
            bucket.work = dist.broadcast(bucket.flat, group=bucket.among, group_src=bucket.owner, async_op=True)

    def wait(self) -> None:
        """Until this rank has all weights, and no other needs its own any more."""
        _wait(self._buckets)


def _wait(buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        bucket.wait()


def _flattened(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A buffer of which the parameters are views from now on."""
    sizes = [-(-p.numel() // _ALIGNED) * _ALIGNED for p in parameters]
    flat = parameters[0].detach().new_zeros(sum(sizes))
    for p, part in zip(parameters, flat.split(sizes), strict=True):
        p.data = part[: p.numel()].view(p.shape).copy_(p.detach())
    return flat


def _readers(stage: Stage) -> Iterator[tuple[nn.Module, Iterable[nn.Parameter]]]:
    """Modules of a stage in the order of the forward pass, and the parameters that they and what is in them read."""
    if isinstance(stage, EncoderStage):
        inner = {p for layer in stage.layers for p in layer.parameters()}
        yield stage, [p for p in stage.names.values() if p not in inner]
    if isinstance(stage, LlmStage) and stage.is_first:
        yield stage.decoder.embed_tokens, stage.decoder.embed_tokens.parameters()
    for layer in stage.layers:
        yield layer, layer.parameters()
    if isinstance(stage, LlmStage) and stage.head is not None:
        # The loss, which comes next, is given the head's weight.
        yield stage.decoder.norm, [*stage.decoder.norm.parameters(), *stage.head.parameters()]
