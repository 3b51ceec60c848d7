"""Gradients of a stage as views of flat float32 buffers, summed over replicas while the last backward pass still runs.

A bucket holds neighbours in the order in which a backward pass reaches them, and can be summed once all of them have
their last gradient (Li et al., arXiv 2006.15704, section 3.2). Replicas begin their sums in one order, that of the
buckets; a replica whose last microbatch leaves a module out begins the rest when its passes are over. Where replicas
share out the optimizer (`zero.py`), all parameters of a bucket have one owner, who alone gets the sum; an embedding is
a bucket per owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from dflop.parallel.part import even_rows
from dflop.train.parameter_groups import is_hidden_matrix

Owners = Mapping[str, tuple[int, ...]]
"""Replicas that update a parameter, each an even share of its rows, numbered as those that have it are; what is
missing, all update alike."""
Rows = tuple[slice, ...]
"""Index of rows of a parameter; empty: all."""
BUCKET_BYTES = 64 << 20
"""Bytes of a buffer, unless one parameter is larger: enough to hide latency, small enough to begin early."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Some parameters' values or gradients side by side, on their way between replicas or not."""

    flat: torch.Tensor
    owner: int | None
    """Rank that updates the parameters; None: all do."""
    among: dist.ProcessGroup | None = None
    """Who has them, in whose order the owner is numbered; None: this rank alone."""
    num_parameters: int = 0
    num_missing: int = 0
    """Parameters without their last gradient of the step."""
    work: dist.Work | None = None

    def wait(self) -> None:
        """Until it is where it was sent, if it was."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class GradientBuckets:
    """Buffers of a seat's gradients; from now on every parameter's `.grad` is a view of one.

    Args:
        parameters: By global name, in the order of the forward pass; equal on all replicas.
        owners: Replica that alone needs a parameter's gradient; where none is named, all do.
        replicas: Who sums; None: this rank is alone.
        late: Names of those that something else changes behind the last backward pass: summed when all else is.
        apart: Names of those that fewer ranks have, and these: experts that replicas share.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], owners: Owners, replicas: dist.ProcessGroup | None,
        *, late: Collection[str] = (), apart: Mapping[str, dist.ProcessGroup] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._replicas = replicas if replicas is not None and replicas.size() > 1 else None
        self._buckets: list[Bucket] = []
        self._num_begun = self._num_late = 0
        self._is_last_pass = False
        backward = list(reversed(list(parameters)))
        early = [name for name in backward if name not in late]
        for names in (early, [name for name in backward if name in late]):
            for (among, owned), members in grouped({name: parameters[name] for name in names}, owners, apart):
                made = self._buckets_of(members, owned, among or self._replicas, is_late=names is not early)
                self._buckets += made
                self._num_late += len(made) * (names is not early)

    @property
    def flats(self) -> list[torch.Tensor]:
        """The buffers."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def late(self) -> list[torch.Tensor]:
        """Buffers of parameters that something else changes."""
        return self.flats[len(self._buckets) - self._num_late :]

    def expect_last(self) -> None:
        """The next backward pass is the last of the step."""
        self._is_last_pass = True

    def finish(self) -> None:
        """Begin the sums that are left and wait for all; collective over the replicas."""
        self._is_last_pass = False
        for bucket in self._buckets[self._num_begun :]:
            self._begin(bucket)
        for bucket in self._buckets:
            bucket.wait()
            bucket.num_missing = bucket.num_parameters
        self._num_begun = 0

    def zero(self) -> None:
        """Set all gradients to zero."""
        for flat in self.flats:
            flat.zero_()

    def _buckets_of(
        self, members: list[nn.Parameter], owners: tuple[int, ...], among: dist.ProcessGroup | None, *, is_late: bool
    ) -> list[Bucket]:
        sizes = [p.numel() for p in members]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=members[0].device)
        # A late one lacks a parameter that never arrives, so it begins in `finish`.
        num = len(members) + is_late
        found = [Bucket(part, owner, among, num, num) for part, owner in of_owners(flat, members, owners)]
        for p, part in zip(members, flat.split(sizes), strict=True):
            p.grad = part.view(p.shape)
            if self._replicas is not None and not is_late:
                p.register_post_accumulate_grad_hook(partial(self._arrived, found))
        return found

    def _arrived(self, buckets: Sequence[Bucket], _: torch.Tensor) -> None:
        if not self._is_last_pass:
            return
        for bucket in buckets:
            bucket.num_missing -= 1
        while self._num_begun < len(self._buckets) and not self._buckets[self._num_begun].num_missing:
            self._begin(self._buckets[self._num_begun])

    def _begin(self, bucket: Bucket) -> None:
        self._num_begun += 1
        if bucket.among is None or bucket.among.size() == 1:
            return
        if bucket.owner is None:
            bucket.work = dist.all_reduce(bucket.flat, group=bucket.among, async_op=True)
        else:
            bucket.work = dist.reduce(bucket.flat, group=bucket.among, group_dst=bucket.owner, async_op=True)


def num_owners(name: str, p: torch.Tensor, num_replicas: int) -> int:
    """How many replicas may update a parameter: one for each bucket that its gradient fills.

    A hidden matrix has one, as Muon updates whole ones. An embedding alone is more than a replica's share of a model.
    """
    if is_hidden_matrix(name, p.ndim) or not p.ndim:
        return 1
    rows = -(-len(p) // min(num_replicas, -(-4 * p.numel() // BUCKET_BYTES)))
    return -(-len(p) // rows)


def owned_rows(p: torch.Tensor, owners: tuple[int, ...], own: int) -> Rows | None:
    """What one of those who have a parameter updates of it; None: nothing."""
    if own not in owners or len(owners) == 1:
        return () if own in owners else None
    return (slice(*even_rows(len(p), len(owners), owners.index(own))),)


def of_owners(
    flat: torch.Tensor, members: Sequence[nn.Parameter], owners: tuple[int, ...]
) -> list[tuple[torch.Tensor, int | None]]:
    """A buffer, and who updates what is in it, none: all; where several do, rows of its only member for each."""
    if len(owners) < 2:
        return [(flat, owners[0] if owners else None)]
    (p,) = members
    rows = -(-len(p) // len(owners))
    return list(zip(flat[: p.numel()].split(rows * p[0].numel()), owners, strict=True))


Place = tuple[dist.ProcessGroup | None, tuple[int, ...]]
"""(group where that is not all replicas, owners) of a parameter."""


def grouped(
    parameters: Mapping[str, nn.Parameter], owners: Owners, apart: Mapping[str, dist.ProcessGroup]
) -> list[tuple[Place, list[nn.Parameter]]]:
    """(place, parameters of one type) of each bucket, ordered by where its last parameter stands."""
    found: list[tuple[Place, list[nn.Parameter]]] = []
    open_of: dict[tuple[Place, torch.dtype], list[nn.Parameter]] = {}
    for name, p in parameters.items():
        place = apart.get(name), owners.get(name, ())
        members = open_of.setdefault((place, p.dtype), [])
        if members and 4 * (sum(m.numel() for m in members) + p.numel()) > BUCKET_BYTES:
            found.append((place, members))
            members = open_of[place, p.dtype] = []
        members.append(p)
    position = {p: n for n, p in enumerate(parameters.values())}
    found += [(place, members) for (place, _), members in open_of.items()]
    return sorted(found, key=lambda each: position[each[1][-1]])
