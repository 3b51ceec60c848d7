"""Parameters that a process of each stage holds, and which of them train; `dflop/plan/memory.py` counts their bytes.

An LLM's first stage holds the embedding, and its last the head, or a tied one once more; tensor-parallel ranks share
the rows of both. An encoder's first stage holds what comes before its layers, its last what comes after them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop.cost.activations import kind_bytes_per_token
from dflop.cost.model import Floats
from dflop.plan.candidates import Bools
from dflop.records import LLM, CostTable, LayerKind, ModuleSpec, RunMode
from dflop.schedule.items import Ints

FLOAT32_BYTES = 4
"""Bytes of a gradient, a master weight, a moment."""
BUCKET_BYTES = 64 << 20
"""Bytes of `train/buckets.py`'s buffers; where owners get the sums, each has its own."""
GATHERED_LAYERS = 2
"""Layers whose weights FSDP2 has gathered at once: one runs, the next is on its way."""


@dataclass(frozen=True, slots=True)
class StageParams:
    """Parameters of one process of every stage, each `[..., P]`."""

    num_layers: Ints
    kept: Floats
    """What a stage's layers keep, in mean layers of the module."""
    most_kept: Floats
    """The same of the one that keeps most."""
    is_first: Bools
    """Whether a stage holds the module's first layer."""
    is_last: Bools
    layers: Ints
    largest_layers: Ints
    """Were all layers of a stage like its largest."""
    entry: Ints
    """Before the layers: an embedding, patches and positions."""
    behind: Ints
    """Behind them, and of deep features: a head that is not this stage's embedding, a projector."""
    behind_matrix: Ints
    """The largest of those."""
    matrix: Ints
    """The largest of a layer; `num_matrices` of the stage are that large."""
    num_matrices: Ints
    ep: int = 1
    """Expert-parallel degree in replicas, tensor-parallel ranks not counted."""
    experts: Ints | int = 0
    """Share of `layers` in experts that `ep` replicas share, all together; `largest_layers` are without them."""
    largest_experts: Ints | int = 0
    """The same of the layer that has most."""
    num_averages: int = 0
    """Per parameter that trains, kept by the optimizer."""
    adapters: Ints | int = 0
    """Parameters of low-rank adapters, which the others do not include."""
    edge_adapters: Ints | int = 0
    """Adapter parameters outside the layers."""
    most_adapters: Ints | int = 0
    """Adapter parameters of the layer that has most."""
    largest_adapter: Ints | int = 0
    """Both of its matrices."""

    def select(self, rows: Ints | Bools) -> StageParams:
        """Parameters of the layouts at indices or under a mask, from `[C, P]`."""
        fields = (getattr(self, name) for name in _FIELDS)
        changed: Iterable[Any] = (of[rows] if isinstance(of, np.ndarray) else of for of in fields)
        return StageParams(*changed)

    @property
    def total(self) -> Ints:
        return self.layers + self.entry + self.behind + self.adapters

    def trained(self, table: CostTable) -> Ints:
        """Parameters that train: all or none, adapters, or what follows the frozen tower of an encoder."""
        if table.is_frozen:
            return np.zeros_like(self.layers)
        if table.trains_adapters:
            return np.zeros_like(self.layers) + self.adapters
        return self.total if table.trains_layers else self.behind

    def largest(self, table: CostTable, replicas: Ints) -> Ints:
        """The largest one that trains, of an embedding or a head what one of its owners updates."""
        if table.is_frozen:
            return np.zeros_like(self.layers)
        if table.trains_adapters:
            return np.zeros_like(self.layers) + self.largest_adapter
        if not table.trains_layers:
            return self.behind_matrix
        ends = np.maximum(self.entry, self.behind_matrix)
        if table.module == LLM:
            num_buckets = -(-ends * FLOAT32_BYTES // BUCKET_BYTES)
            ends = -(-ends // np.clip(num_buckets, 1, np.maximum(replicas, 1)))
        found: Ints = np.maximum(ends, self.matrix)
        return found

    def shared(self, table: CostTable) -> Ints:
        """Parameters that FSDP2 shards: all but a frozen encoder's."""
        return self.total * _is_shared(table)

    def ends(self, table: CostTable) -> Ints:
        """Parameters that FSDP2 shards outside the layers."""
        return (self.entry + self.behind + self.edge_adapters) * _is_shared(table)

    def trained_ends(self, table: CostTable) -> Ints:
        """Parameters outside the layers that train."""
        of_layers = (self.adapters - self.edge_adapters) * table.trains_adapters
        return self.trained(table) - self.layers * table.trains_layers - of_layers

    def passing(self, table: CostTable) -> tuple[Floats, Floats]:
        """Sharded parameters (of layers gathered at once, of the unit whose gradients are summed)."""
        layer = self.largest_layers * _is_shared(table) / np.maximum(self.num_layers, 1)
        experts = self.largest_experts * table.trains_layers / self.ep
        gathered = np.minimum(self.num_layers, GATHERED_LAYERS) * (layer + self.most_adapters) + experts
        trained = layer * table.trains_layers + self.most_adapters * table.trains_adapters
        return gathered, np.maximum(np.maximum(trained, experts), self.trained_ends(table))

    def whole_experts(self, table: CostTable) -> Floats:
        """Parameters of a rank's experts, gathered from the first pass of a step to the last."""
        found: Floats = np.asarray(self.experts * table.trains_layers / self.ep)
        return found

    def least_owned(self, table: CostTable, replicas: Ints) -> Ints:
        """Parameters that some replica owns of a shared optimizer, however well `train/zero.py` deals them out.

        With more matrices than replicas one of them has two, whatever the mean is. A part of experts that `ep` replicas
        share is owned by one of those that have it. Experts that are whole are taken for matrices.
        """
        several = self.matrix * -(-self.num_matrices // np.maximum(replicas // self.ep, 1)) * table.trains_layers
        found: Ints = np.maximum(self.largest(table, replicas), several)
        return found


_FIELDS = [field.name for field in dataclasses.fields(StageParams)]


def first_and_last(layers: Ints) -> tuple[Bools, Bools]:
    """For layers `[..., P]`: the stage that holds the first layer of the module, and the one that holds the last."""
    holds = layers > 0
    beyond = np.zeros((*layers.shape[:-1], 1), dtype=bool)
    before, after = np.concatenate([beyond, holds[..., :-1]], -1), np.concatenate([holds[..., 1:], beyond], -1)
    return holds & ~before, holds & ~after


def stage_params(spec: ModuleSpec, layers: Ints, tp: int, ep: int = 1) -> StageParams:
    """What one process of each stage has of a module whose stages have `layers`, `[..., P]`.

    What replicas share is counted as if each had all of it, experts as well. Tensor parallelism does not cut experts
    that are shared: its ranks are among the `ep` that share them.
    """
    first, last = first_and_last(layers)
    head, entry = 0 if spec.is_tied else spec.vocab_size * spec.hidden_size, entry_params(spec, tp)
    behind = last * (spec.num_edge_params - spec.num_entry_params - spec.num_deep_params - head + -(-head // tp))
    if spec.is_tied:
        behind = behind + (last & ~first) * entry
    end = np.cumsum(layers, axis=-1)
    for layer in spec.deep_layers:
        holds = (end - layers <= layer) & (layer < end)
        behind = behind + holds * (spec.num_deep_params // len(spec.deep_layers))
    held, mean_bytes = _kinds_held(spec, layers), spec.mean(kind_bytes_per_token) or 1.0

    replicas = max(ep // tp, 1)

    def share(kind: LayerKind) -> float:
        return kind_bytes_per_token(kind) / mean_bytes

    def matrix(kind: LayerKind) -> int:
        largest = kind.num_matrix_params or spec.hidden_size * max(kind.mlp_width, kind.query_width)
        return largest // replicas if kind.num_experts else largest

    def shared(kind: LayerKind) -> int:
        return kind.num_expert_params if ep > 1 else 0

    def own(kind: LayerKind) -> int:
        return shared(kind) // replicas or kind.num_params

    def adapters(kind: LayerKind) -> list[int]:
        return [-(-shared // tp) + whole for shared, whole in kind.adapters]

    return StageParams(
        num_layers=layers,
        kept=_total(held, share),
        most_kept=_most(held, share),
        is_first=first,
        is_last=last,
        layers=-(-_total(held, lambda kind: kind.num_params) // tp),
        largest_layers=-(-layers * _most(held, lambda kind: kind.num_params - shared(kind)) // tp),
        entry=first * entry,
        behind=behind,
        behind_matrix=np.minimum(behind, spec.num_projector_matrix_params or behind),
        matrix=-(-_most(held, matrix) // tp),
        num_matrices=_total(held, lambda kind: min(2 + kind.is_gated_mlp, own(kind) // matrix(kind))),
        ep=replicas,
        experts=-(-_total(held, shared) // tp),
        num_averages=int(spec.keeps_average),
        largest_experts=-(-_most(held, shared) // tp),
        adapters=_total(held, lambda kind: sum(adapters(kind))) + last * spec.num_edge_adapter_params,
        edge_adapters=last * spec.num_edge_adapter_params,
        most_adapters=_most(held, lambda kind: sum(adapters(kind))),
        largest_adapter=_most(held, lambda kind: max(adapters(kind), default=0)),
    )


def entry_params(spec: ModuleSpec, tp: int) -> int:
    """Parameters that a rank has before the layers: of an embedding its rows."""
    rows = min(spec.vocab_size * spec.hidden_size, spec.num_entry_params)
    return spec.num_entry_params - rows - (-rows // tp)


def chain_params(specs: Sequence[ModuleSpec], layers: Iterable[Ints], mode: RunMode) -> list[StageParams]:
    """What stages have of each module of a chain; `layers` are `[..., P]` per module."""
    return [stage_params(spec, own, mode.tp, mode.ep) for spec, own in zip(specs, layers, strict=True)]


def _is_shared(table: CostTable) -> bool:
    return table.module == LLM or not table.is_frozen


def _kinds_held(spec: ModuleSpec, layers: Ints) -> list[tuple[LayerKind, Ints]]:
    """Every kind of a module's layers, and how many of them each stage holds, `[..., P]`."""
    if len(spec.kinds) == 1:
        return [(spec.kinds[0], layers)]
    of_layer = [kind for kind, num in spec.layers for _ in range(num)]
    end, held = np.cumsum(layers, axis=-1), []
    for kind in spec.kinds:
        before = np.cumsum([0, *(own == kind for own in of_layer)])
        held.append((kind, before[end] - before[end - layers]))
    return held


def _total(held: Sequence[tuple[LayerKind, Ints]], of: Callable[[LayerKind], float]) -> Any:
    """Per stage the sum over its layers; the number 0 where it is none for all."""
    return functools.reduce(operator.add, (num * value for kind, num in held if (value := of(kind))), 0)


def _most(held: Sequence[tuple[LayerKind, Ints]], of: Callable[[LayerKind], float]) -> Any:
    """Per stage the largest of its layers, 0 where it has none; the number 0 where it is 0 for all."""
    of_kinds: Iterable[Any] = ((num > 0) * value for kind, num in held if (value := of(kind)))
    return functools.reduce(np.maximum, of_kinds, 0)
