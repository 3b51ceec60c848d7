"""Parameters that a process of each stage holds, and which of them train; `dflop/plan/memory.py` counts their bytes.

An LLM's first stage holds the embedding, whole on every tensor-parallel rank, and its last the head, or a tied one once
more; an encoder's first stage holds what is before its layers, its last what is behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.cost.towers import trains_layers
from dflop.plan.candidates import Bools
from dflop.records import CostTable, ModuleSpec
from dflop.schedule.items import Ints

GATHERED_LAYERS = 2
"""Layers whose weights FSDP2 has gathered at once: one runs, the next is on its way."""


@dataclass(frozen=True, slots=True)
class StageParams:
    """Parameters of one process of every stage, each `[..., P]`."""

    num_layers: Ints
    is_last: Bools
    layers: Ints
    entry: Ints
    """Before the layers: an embedding, patches and positions."""
    behind: Ints
    """Behind them, and of deep features: a head that is not this stage's embedding, a projector."""
    behind_matrix: Ints
    """The largest of those."""
    matrix: Ints
    """The largest of a layer; `num_matrices` of the stage are that large."""
    num_matrices: Ints

    @property
    def total(self) -> Ints:
        return self.layers + self.entry + self.behind

    def trained(self, table: CostTable) -> Ints:
        """Those that train: all or none, or of an encoder with a frozen tower what is behind it."""
        if table.is_frozen:
            return np.zeros_like(self.layers)
        return self.total if trains_layers(table) else self.behind

    def largest(self, table: CostTable) -> Ints:
        """The largest one that trains."""
        if table.is_frozen:
            return np.zeros_like(self.layers)
        if not trains_layers(table):
            return self.behind_matrix
        found: Ints = np.maximum.reduce([self.entry, self.behind_matrix, self.matrix])
        return found

    def ends(self, table: CostTable) -> Ints:
        """Those outside the layers that train."""
        return self.trained(table) - self.layers * trains_layers(table)

    def passing(self, table: CostTable) -> tuple[Floats, Floats]:
        """Of shared parameters (those of layers gathered at once, those of the unit whose gradients are summed)."""
        layer = self.layers * trains_layers(table) / np.maximum(self.num_layers, 1)
        return np.minimum(self.num_layers, GATHERED_LAYERS) * layer, np.maximum(layer, self.ends(table))

    def least_owned(self, table: CostTable, replicas: Ints) -> Ints:
        """Those that some replica owns of a shared optimizer, however well `train/zero.py` deals them out.

        With more matrices than replicas one of them has two, whatever the mean is.
        """
        several = self.matrix * -(-self.num_matrices // replicas) * trains_layers(table)
        found: Ints = np.maximum(self.largest(table), several)
        return found


def first_and_last(layers: Ints) -> tuple[Bools, Bools]:
    """For layers `[..., P]`: the stage that holds the first layer of the module, and the one that holds the last."""
    holds = layers > 0
    beyond = np.zeros((*layers.shape[:-1], 1), dtype=bool)
    before, after = np.concatenate([beyond, holds[..., :-1]], -1), np.concatenate([holds[..., 1:], beyond], -1)
    return holds & ~before, holds & ~after


def stage_params(spec: ModuleSpec, layers: Ints, tp: int) -> StageParams:
    """What one process of each stage has of a module whose stages have `layers`, `[..., P]`."""
    first, last = first_and_last(layers)
    head = 0 if spec.is_tied else spec.vocab_size * spec.hidden_size
    behind = last * (spec.num_edge_params - spec.num_entry_params - spec.num_deep_params - head + -(-head // tp))
    if spec.is_tied:
        behind = behind + (last & ~first) * spec.num_entry_params
    end = np.cumsum(layers, axis=-1)
    for layer in spec.deep_layers:
        holds = (end - layers <= layer) & (layer < end)
        behind = behind + holds * (spec.num_deep_params // len(spec.deep_layers))
    return StageParams(
        num_layers=layers,
        is_last=last,
        layers=-(-layers * spec.num_layer_params // tp),
        entry=first * spec.num_entry_params,
        behind=behind,
        behind_matrix=np.minimum(behind, spec.num_projector_matrix_params or behind),
        matrix=(layers > 0) * -(-spec.hidden_size * max(spec.mlp_width, spec.query_width) // tp),
        num_matrices=layers * (2 + spec.is_gated_mlp),
    )
