"""StepPlan -> the tensors this rank needs, and only those: encoder ranks decode media, LLM ranks tokenize text.

A whole step is prepared before it starts (one step ahead, in a thread), so that a file that turns out to be broken is
known to every rank in time: its rows become zeros, its sample carries no loss, and nobody else's gradient changes.

A rank reads what its own stages take and nothing else. The ranks of a tensor-parallel group take the same input, and
each reads it for itself: sharing it would tie their feeds together by one more collective per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dflop.errors import TrainError
from dflop.models.build import IGNORE_LABEL, EncoderStage, LlmStage, Stage
from dflop.models.family import Family
from dflop.models.item_arithmetic import Arguments
from dflop.models.positions import MediaPosition
from dflop.parallel.topology import Peers, Seat, peers_of
from dflop.records import LLM, MediaItem, ModuleWork, Plan, SampleShape, StepPlan
from dflop.train.activity import Activity
from dflop.train.packing import MediaPacker
from dflop.train.prefetch import Prefetcher
from dflop.train.routes import routes


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """Token ids of one sample with media placeholders expanded."""

    input_ids: np.ndarray
    """int64 `[tokens]`."""
    labels: np.ndarray
    """int64 `[tokens]`, `IGNORE_LABEL` where no loss is taken."""
    item_positions: tuple[np.ndarray, ...]
    """int64 `[rows]` per media item: positions of its placeholders."""


class SampleSource(Protocol):
    """Where tokens and media come from; `jobs/` supplies the one over datasets, tests a synthetic one."""

    def shape(self, sample_index: int) -> SampleShape:
        """Shape of a sample."""
        ...

    def tokens(self, sample_index: int) -> TokenizedSample:
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
    """Packed items; None off the encoder's first stage."""
    sizes: torch.Tensor
    """int64 `[items, n]`: `Family.item_size` of each; stays on the host."""
    arithmetic: Arguments | None
    """What the stage works out from the sizes; None where the rank holds no layer of the encoder."""
    num_rows: int
    """That the items become for the LLM."""
    transfers: tuple[Transfer, ...]
    """Where the rows go, on the last stage of a split plan."""


@dataclass(frozen=True, slots=True)
class LlmInput:
    """The LLM's part of a microbatch; every stage of a replica holds the same."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    transfers: tuple[Transfer, ...]
    """Where rows come from, in a split plan."""
    own_rows: Mapping[str, torch.Tensor]
    """Per encoder, positions of the rows that this replica makes itself, in an inline plan."""
    loss_where: torch.Tensor
    """Positions that predict a supervised token."""
    loss_targets: torch.Tensor
    loss_sample: torch.Tensor
    """For each of them, the position of its sample in the global batch."""


@dataclass(frozen=True, slots=True)
class MicrobatchInput:
    """What one rank needs for one microbatch in which it has work."""

    encoders: Mapping[str, EncoderInput]
    """Encoders of the rank's grid that have items in it, whether or not the rank holds layers of them."""
    llm: LlmInput | None
    """None where the rank holds no layer of the LLM."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Everything one rank needs for one step."""

    step_plan: StepPlan
    microbatches: tuple[MicrobatchInput | None, ...]
    bad_samples: Mapping[int, tuple[str, str]]
    """Position in the global batch -> (path, reason) of media this rank failed to decode."""


class Feed:
    """Prepares steps for one seat.

    Args:
        source: Tokens and media.
        family: Shapes of encoder inputs.
        plan: The layout.
        seat: This rank's place in it.
        stages: The rank's own, by module: for rope positions and for what encoders work out from sizes.
        prefetcher: Decodes media in workers; None: `source` does, here and one after the other.
        dtype: What encoders take.
        pins: Whether tensors lie in page-locked memory, from which copies to a GPU need not be waited for.
        activity: Told what the thread that prepares does.
    """

    def __init__(
        self, source: SampleSource, family: Family, plan: Plan, seat: Seat, stages: Mapping[str, Stage], *,
        prefetcher: Prefetcher | None = None, dtype: torch.dtype = torch.float32, pins: bool = False,
        activity: Activity | None = None,
    ) -> None:  # fmt: skip
        self._source, self._family, self._plan, self._seat = source, family, plan, seat
        self._stages, self._pins = stages, pins
        self._activity = activity or Activity()
        self._packer = MediaPacker(
            source.shape, source.array, family, seat, prefetcher=prefetcher, dtype=dtype, pins=pins,
            activity=self._activity,
        )  # fmt: skip

    def prepare(self, step_plan: StepPlan, later: Sequence[StepPlan] = ()) -> PreparedStep:
        """Decode or tokenize this rank's part of a global batch.

        Args:
            step_plan: The step.
            later: Steps behind it whose media workers begin to decode when they are done with this one's.

        Raises:
            TrainError: a sample is not what was profiled.
        """
        self._packer.begin(step_plan, later)
        bad: dict[int, tuple[str, str]] = {}
        inputs = tuple(self._microbatch(step_plan, k, bad) for k in range(step_plan.num_microbatches))
        self._packer.finish(step_plan)
        return PreparedStep(step_plan, inputs, bad)

    def look_ahead(self, later: Sequence[StepPlan]) -> None:
        """Let workers begin with the media of later steps, in order, as far as there is room for them."""
        self._packer.look_ahead(later)

    def close(self) -> None:
        """End the workers; whoever is in `prepare` gets an error."""
        self._packer.close()

    def _microbatch(self, step_plan: StepPlan, k: int, bad: dict[int, tuple[str, str]]) -> MicrobatchInput | None:
        if not step_plan.of(self._seat.module).owner[k][self._seat.dp_rank]:
            return None
        names = [e.module for e in self._plan.encoders if self._plan.is_inline or e.module == self._seat.module]
        encoders = {name: self._encoder_input(step_plan, name, k, bad) for name in names}
        return MicrobatchInput(
            {name: given for name, given in encoders.items() if given is not None},
            self._llm_input(step_plan, k) if self._seat.part(LLM) else None,
        )

    def _encoder_input(
        self, step_plan: StepPlan, module: str, k: int, bad: dict[int, tuple[str, str]]
    ) -> EncoderInput | None:
        work, part = step_plan.of(module), self._seat.part(module)
        items = work.owner[k][self._seat.dp_rank]
        if not items:
            return None
        media = [self._packer.media(step_plan, work, item)[1] for item in items]
        data = self._packer.pack(step_plan, work, items, bad) if part is not None and part.is_first else None
        self._activity.works("its data")
        sends = self._sends(step_plan, module, k) if part is not None and part.is_last else ()
        sizes = torch.tensor([self._family.item_size(m) for m in media])
        stage, made = self._stages.get(module), None
        if isinstance(stage, EncoderStage):
            made = stage.arithmetic(sizes)
            made = {n: self._placed(x) if isinstance(x, torch.Tensor) else x for n, x in made.items()}
        return EncoderInput(data, sizes, made, sum(work.item_rows[i] for i in items), sends)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the engine takes it from."""
        return tensor.pin_memory() if self._pins else tensor

    def _sends(self, step_plan: StepPlan, module: str, k: int) -> tuple[Transfer, ...]:
        if self._plan.is_inline:
            return ()
        llm, tp = self._plan.module(LLM), self._plan.module(module).parallel.tp
        return tuple(
            Transfer(module, peers_of(self._seat, tp, llm, 0, r.llm_dp), self._placed(_index(r.source_rows)))
            for r in routes(step_plan, module, k)
            if r.encoder_dp == self._seat.dp_rank
        )

    def _llm_input(self, step_plan: StepPlan, k: int) -> LlmInput:
        llm = step_plan.of(LLM)
        positions = [llm.item_sample[i] for i in llm.owner[k][self._seat.dp_rank]]
        samples = [self._tokens(step_plan.sample_index[p]) for p in positions]
        starts = np.concatenate([[0], np.cumsum([len(s.input_ids) for s in samples])])
        packed = dict(zip(positions, zip(starts, samples, strict=False), strict=True))
        where, targets, owner = [], [], []
        for start, position, sample in zip(starts, positions, samples, strict=False):
            (supervised,) = np.nonzero(sample.labels[1:] != IGNORE_LABEL)
            where.append(supervised + start)
            targets.append(sample.labels[supervised + 1])
            owner.append(np.full(len(supervised), position))
        rope = [self._positions(step_plan.sample_index[p], s) for p, s in zip(positions, samples, strict=True)]
        return LlmInput(
            input_ids=self._placed(torch.from_numpy(np.concatenate([s.input_ids for s in samples]))),
            position_ids=self._placed(torch.cat(rope, dim=1)),
            cu_seqlens=self._placed(torch.from_numpy(starts.astype(np.int32))),
            transfers=() if self._plan.is_inline else self._receives(step_plan, k, packed),
            own_rows=self._own_rows(step_plan, k, packed) if self._plan.is_inline else {},
            loss_where=torch.from_numpy(np.concatenate(where)),
            loss_targets=torch.from_numpy(np.concatenate(targets)),
            loss_sample=torch.from_numpy(np.concatenate(owner)),
        )

    def _tokens(self, sample_index: int) -> TokenizedSample:
        sample, shape = self._source.tokens(sample_index), self._source.shape(sample_index)
        num_supervised = int((sample.labels[1:] != IGNORE_LABEL).sum())
        for what, found, profiled in (
            ("tokens", len(sample.input_ids), shape.num_llm_tokens),
            ("supervised tokens", num_supervised, shape.num_supervised_tokens),
        ):
            if found != profiled:
                raise TrainError(
                    f"sample `{shape.sample_id}` has {found} {what} but was profiled with {profiled}",
                    where=f"annotation row {sample_index}",
                    hint="annotations or tokenizer changed after the data profile: profile again",
                )
        return sample

    def _positions(self, sample_index: int, sample: TokenizedSample) -> torch.Tensor:
        stage = self._stages.get(LLM)
        if not isinstance(stage, LlmStage):
            raise TrainError(f"rank {self._seat.rank} was asked for LLM input, but holds `{self._seat.module}`")
        items = [MediaPosition(i.kind, i.grid, seconds_per_grid(i)) for i in self._source.shape(sample_index).items]
        return stage.positions(torch.from_numpy(sample.input_ids), items)

    def _receives(
        self, step_plan: StepPlan, k: int, packed: Mapping[int, tuple[int, TokenizedSample]]
    ) -> tuple[Transfer, ...]:
        transfers, tp = [], self._plan.module(LLM).parallel.tp
        for encoder in self._plan.encoders:
            work = step_plan.of(encoder.module)
            for route in routes(step_plan, encoder.module, k):
                if route.llm_dp == self._seat.dp_rank:
                    peers = peers_of(self._seat, tp, encoder, encoder.parallel.pp - 1, route.encoder_dp)
                    rows = self._placed(_placeholders(work, route.items, packed))
                    transfers.append(Transfer(encoder.module, peers, rows))
        return tuple(transfers)

    def _own_rows(
        self, step_plan: StepPlan, k: int, packed: Mapping[int, tuple[int, TokenizedSample]]
    ) -> dict[str, torch.Tensor]:
        found = {}
        for encoder in self._plan.encoders:
            work = step_plan.of(encoder.module)
            if items := work.owner[k][self._seat.dp_rank]:
                found[encoder.module] = self._placed(_placeholders(work, items, packed))
        return found


def _placeholders(
    work: ModuleWork, items: Sequence[int], packed: Mapping[int, tuple[int, TokenizedSample]]
) -> torch.Tensor:
    """Positions in the packed tokens of the rows of some items, in their order."""
    positions = []
    for item in items:
        start, sample = packed[work.item_sample[item]]
        positions.append(start + sample.item_positions[work.item_rank_in_sample[item]])
    return torch.from_numpy(np.concatenate(positions))


def seconds_per_grid(item: MediaItem) -> float:
    """Seconds of video one temporal patch stands for; 0 for anything but video."""
    return item.duration_s / item.grid[0] if item.kind == "video" else 0.0


def _index(spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(start, end) for start, end in spans])
