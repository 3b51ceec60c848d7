"""What a step is made of on one rank: samples as they are read, and the tensors that the engine takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from dflop.data.tokens import EncodedSample
from dflop.models.encoders import Arguments
from dflop.parallel.topology import Peers
from dflop.records import SampleShape, StepPlan
from dflop.train.context import FeatureExchange, FrameExchange, KeyExchange, RowExchange


class SampleSource(Protocol):
    """Where tokens and media come from; `jobs/` supplies the one over datasets, tests a synthetic one."""

    def shape(self, sample_index: int) -> SampleShape:
        """Shape of a sample."""
        ...

    def tokens(self, sample_index: int) -> EncodedSample:
        """Tokens of a sample."""
        ...

    def array(self, sample_index: int, item: int) -> np.ndarray:
        """Encoder input of one media item; raises `MediaError`."""
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows exchanged with one replica of another grid for one microbatch."""

    module: str
    """The encoder whose rows they are."""
    peers: Peers
    rows: torch.Tensor
    """int64 index of the rows in this rank's own tensor (encoder output, or packed LLM tokens)."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One encoder's part of a microbatch."""

    data: torch.Tensor | None
    """Packed items, or tiles of them; None where the rank does not hold the encoder, or none was dealt to it."""
    sizes: torch.Tensor
    """int64 `[items, n]`: `Family.item_size` of each, or of its tiles here, of parts of frames the items'; stays on the
    host."""
    arithmetic: Arguments | None
    """What the encoder works out from the sizes; None where it is not made ahead."""
    num_rows: int
    """Rows this rank hands on to the LLM."""
    transfers: tuple[Transfer, ...]
    """Where the rows go, in a split plan."""
    features: FeatureExchange | None = None
    """How tiles that were dealt out over context-parallel ranks come together; None on all of them or on none."""
    frames: FrameExchange | None = None
    """What ranks with parts of one frame exchange in every layer; None on all of them or on none."""


@dataclass(frozen=True, slots=True)
class LlmInput:
    """The LLM's part of a microbatch, of a context-parallel rank its own; every stage of a replica holds the same."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    transfers: tuple[Transfer, ...]
    """Where rows come from, in a split plan."""
    own_rows: Mapping[str, torch.Tensor]
    """Per encoder, positions of the rows that this replica makes itself, or its group does, in a colocated plan."""
    row_exchanges: Mapping[str, RowExchange]
    """How context-parallel ranks exchange rows of those encoders first; the same on all of them."""
    keys: KeyExchange | None
    """What they exchange in every layer; None on all of them or on none."""
    loss_where: torch.Tensor
    """Positions that predict a supervised token."""
    loss_targets: torch.Tensor
    loss_sample: torch.Tensor
    """For each of them, the position of its sample in the global batch."""
    samples: tuple[int, ...] = ()
    """Positions in the global batch of the samples that `cu_seqlens` is of; none of a filler."""
    counted: torch.Tensor | None = None
    """bool `[tokens]`, those of healthy samples; None until it is known which are."""
    num_tokens: int = 0
    """Tokens of the whole context-parallel group without fillers, or of the fullest that shares experts: by them
    layers run again in the backward pass."""


@dataclass(frozen=True, slots=True)
class MicrobatchInput:
    """What one rank needs for one microbatch in which it has work."""

    encoders: Mapping[str, EncoderInput]
    """Encoders of the rank's grid that have items in it, whether or not the rank holds layers of them."""
    llm: LlmInput | None
    """None where the rank holds no layer of the LLM."""

    def masked(
        self, healthy: torch.Tensor, placed: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> MicrobatchInput:
        """The same without the loss of samples that are not `healthy`, bool `[global batch]`.

        Args:
            healthy: The same on every rank.
            placed: Moves a tensor to where the engine takes it from.
        """
        if self.llm is None:
            return self
        kept = healthy[self.llm.loss_sample]
        where, targets = placed(self.llm.loss_where[kept]), placed(self.llm.loss_targets[kept])
        of = healthy[list(self.llm.samples)] if self.llm.samples else torch.zeros(1, dtype=torch.bool)
        counted = placed(of.repeat_interleave(self.llm.cu_seqlens.diff()))
        sample = self.llm.loss_sample[kept]
        llm = replace(self.llm, loss_where=where, loss_targets=targets, loss_sample=sample, counted=counted)
        return replace(self, llm=llm)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Everything one rank needs for one step."""

    step_plan: StepPlan
    microbatches: tuple[MicrobatchInput | None, ...]
    bad_samples: Mapping[int, tuple[str, str]]
    """Position in the global batch -> (path, reason) of media this rank failed to decode."""
