"""StepPlan -> the tensors this rank needs, and only those: encoder ranks decode media, LLM ranks tokenize text.

A whole step is prepared before it starts (one step ahead, in a thread), so that a file that turns out to be broken is
known to every rank in time: its rows become zeros, its sample carries no loss, and nobody else's gradient changes.

A rank reads what its own stages take and nothing else. The ranks of a tensor-parallel group take the same input, and
each reads it for itself: sharing it would tie their feeds together by one more collective per step. Context-parallel
ranks tokenize the samples that they have a piece of, and those whose media they encode. One without a token decodes a
filler, and one without media encodes one if others share a frame: the exchanges of its group are in the layers.

Where replicas share out parameters (`fsdp.py`) they gather a module's weights and sum its gradients together, so all of
them must run it or none. Who has nothing encodes zeros in the shape of the step's smallest item, or decodes one token,
and nobody takes what comes of it: no row of it reaches a sample and no token carries loss, so its gradients are zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from dflop.data.tokens import EncodedSample
from dflop.errors import TrainError
from dflop.models.build import IGNORE_LABEL, EncoderStage, Stage
from dflop.models.encoders import Arguments
from dflop.models.family import Family
from dflop.models.generic.llm_stage import LlmStage, MediaPosition
from dflop.parallel.topology import Seat, peers_of
from dflop.records import LLM, MediaItem, ModuleWork, Plan, StepPlan
from dflop.simulate.pieces import Piece, TileRange, dealt, most_tokens, num_parts, owned, pieces
from dflop.train.context import Line, RowExchange
from dflop.train.encoder_share import EncoderShare, Part, whole_frames
from dflop.train.inputs import EncoderInput, LlmInput, MicrobatchInput, PreparedStep, SampleSource, Transfer
from dflop.train.liveness import Activity
from dflop.train.prefetch import MediaError, Prefetcher, Wanted
from dflop.train.routes import routes

Bad = dict[int, tuple[str, str]]
"""Position in the global batch -> (path, reason)."""


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
        fills: Whether this rank gets something to run wherever any replica has work.
        activity: Records what the preparing thread does.
    """

    def __init__(
        self, source: SampleSource, family: Family, plan: Plan, seat: Seat, stages: Mapping[str, Stage], *,
        prefetcher: Prefetcher | None = None, dtype: torch.dtype = torch.float32, pins: bool = False,
        fills: bool = False, activity: Activity | None = None,
    ) -> None:  # fmt: skip
        self._source, self._family, self._plan, self._seat = source, family, plan, seat
        self._stages, self._prefetcher, self._dtype, self._pins = stages, prefetcher, dtype, pins
        self._fills, self._activity = fills, activity or Activity()

    def prepare(self, step_plan: StepPlan, later: Sequence[StepPlan] = ()) -> PreparedStep:
        """Decode or tokenize this rank's part of a global batch.

        Args:
            step_plan: The step.
            later: Steps behind it whose media workers begin to decode when they are done with this one's.

        Raises:
            TrainError: a sample is not what was profiled.
        """
        if self._prefetcher is not None:
            self._prefetcher.begin(step_plan.step, self._wanted(step_plan))
            self.look_ahead(later)
        bad: Bad = {}
        inputs = [self._microbatch(step_plan, k, bad) for k in range(step_plan.num_microbatches)]
        if self._prefetcher is not None:
            self._prefetcher.finish(step_plan.step)
        if self._fills:
            inputs = [self._filled(step_plan, k, given) for k, given in enumerate(inputs)]
        return PreparedStep(step_plan, tuple(inputs), bad)

    def masked(self, prepared: PreparedStep, healthy: torch.Tensor) -> PreparedStep:
        """The step without the loss of samples that are not `healthy`; what the loss reads is ready to be copied."""
        found = [given and given.masked(healthy, self._placed) for given in prepared.microbatches]
        return dataclasses.replace(prepared, microbatches=tuple(found))

    def look_ahead(self, later: Sequence[StepPlan]) -> None:
        """Let workers begin with the media of later steps, in order, as far as there is room for them."""
        for step_plan in later:
            if self._prefetcher is None or not self._prefetcher.begin(
                step_plan.step, self._wanted(step_plan), if_room=True
            ):
                return

    def close(self) -> None:
        """End the workers; whoever is in `prepare` gets an error."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _microbatch(self, step_plan: StepPlan, k: int, bad: Bad) -> MicrobatchInput | None:
        if not step_plan.of(self._seat.module).owner[k][self._seat.dp_rank]:
            return None
        names = [m.module for m in self._plan.grid_of(self._seat.module) if m.module != LLM]
        encoders = {name: self._encoder_input(step_plan, name, k, bad) for name in names}
        return MicrobatchInput(
            {name: given for name, given in encoders.items() if given is not None},
            self._llm_input(step_plan, k) if self._seat.part(LLM) else None,
        )

    def _encoder_input(self, step_plan: StepPlan, module: str, k: int, bad: Bad) -> EncoderInput | None:
        work, share = step_plan.of(module), self._share(step_plan, module, k)
        num_rows, features = sum(work.item_rows[i] for i in share.items), share.features()
        if share.merge_tokens and not share.ranges and self._seat.part(module):
            filler = self._encoder_filler(step_plan, module, share)
            if filler.frames is not None:  # of layers that others' parts of a frame are in
                return dataclasses.replace(filler, num_rows=0, features=features)
        if self._seat.part(module) is None or not share.ranges:  # rows cross here, or come of an exchange
            sizes = share.sizes(share.items)
            return EncoderInput(None, sizes, None, num_rows, (), features) if share.items or features else None
        data = self._packed(step_plan, work, share.ranges, bad)
        self._activity.works("its data")
        sizes, parts = share.sizes_and_parts() if features is not None else (share.sizes(share.items), [])
        arithmetic, sends = self._arithmetic(module, sizes, parts), self._sends(step_plan, module, k)
        return EncoderInput(data, sizes, arithmetic, num_rows, sends, features, share.frames())

    def _share(self, step_plan: StepPlan, module: str, k: int) -> EncoderShare:
        """What the ranks of the group encode."""
        work = step_plan.of(module)
        media = lambda item: self._media(step_plan, work, item)[1]  # noqa: E731  # of this step
        of_ranks = dealt(self._plan, step_plan, module, k, self._seat.dp_rank, media)
        merge_tokens = self._plan.module(module).merge_tokens
        return EncoderShare(of_ranks, self._seat.cp_rank, merge_tokens, self._family, media)

    def _arithmetic(self, module: str, sizes: torch.Tensor, parts: Sequence[Part] = ()) -> Arguments | None:
        """What the encoder works out from sizes and parts of items; None where the rank does not hold it."""
        stage = self._stages.get(module)
        if not isinstance(stage, EncoderStage):
            return None
        made = stage.arithmetic(sizes, parts)
        return {name: self._placed(x) if isinstance(x, torch.Tensor) else x for name, x in made.items()}

    def _packed(self, step_plan: StepPlan, work: ModuleWork, ranges: Sequence[TileRange], bad: Bad) -> torch.Tensor:
        """Arrays of some tiles side by side; zeros for those that cannot be had, which are noted in `bad`."""
        axis = self._family.towers[work.module].data_axis
        of_items = [(item, list(of)) for item, of in itertools.groupby(ranges, key=lambda r: r.item)]
        media = [self._media(step_plan, work, item)[1] for item, _ in of_items]
        shapes = [self._family.array_shape(work.module, m.grid) for m in media]
        merge_tokens = self._plan.module(work.module).merge_tokens
        sizes = [shape[axis] // num_parts(m, merge_tokens) for shape, m in zip(shapes, media, strict=True)]
        ends = itertools.accumulate(
            n * sum(r.end - r.first for r in of) for n, (_, of) in zip(sizes, of_items, strict=True)
        )
        whole = list(shapes[0])
        *starts, whole[axis] = (0, *ends)
        data: torch.Tensor | None = None
        for (item, of), m, shape, n, start in zip(of_items, media, shapes, sizes, starts, strict=True):
            self._activity.works(f"media {m.path}")
            try:
                array = torch.from_numpy(self._take(step_plan, work, item, shape))
            except MediaError as error:
                bad[work.item_sample[item]] = (m.path, str(error))
                if (filler := self._family.filler(m)) is None:
                    continue
                array = torch.from_numpy(filler)
            if data is None:  # bytes stay bytes, until they are on the device
                dtype = array.dtype if array.dtype == torch.uint8 else self._dtype
                data = torch.zeros(whole, dtype=dtype, pin_memory=self._pins)
            for r in of:
                tiles = array.narrow(axis, n * r.first, n * (r.end - r.first))
                data.narrow(axis, start, tiles.shape[axis]).copy_(tiles)
                start += tiles.shape[axis]
        return torch.zeros(whole, dtype=self._dtype, pin_memory=self._pins) if data is None else data

    def _media(self, step_plan: StepPlan, work: ModuleWork, item: int) -> tuple[int, MediaItem]:
        """(sample index, media item) of an item of a module."""
        index = step_plan.sample_index[work.item_sample[item]]
        return index, self._source.shape(index).items[work.item_rank_in_sample[item]]

    def _take(self, step_plan: StepPlan, work: ModuleWork, item: int, shape: tuple[int, ...]) -> np.ndarray:
        if self._prefetcher is not None:
            array = self._prefetcher.take(step_plan.step, (work.module, item))
        else:
            index, _ = self._media(step_plan, work, item)
            array = self._source.array(index, work.item_rank_in_sample[item])
        if array.shape != shape:
            raise MediaError(f"decodes to an array of shape {array.shape}, not {shape} as in its profile")
        return array

    def _wanted(self, step_plan: StepPlan) -> dict[tuple[str, int], Wanted]:
        """Media that this rank's encoder stages take, by (module, item), in the order in which they do."""
        found = {}
        for k in range(step_plan.num_microbatches):
            for part in (p for p in self._seat.parts if p.module != LLM):
                work = step_plan.of(part.module)
                for item, *_ in self._share(step_plan, part.module, k).ranges:
                    index, media = self._media(step_plan, work, item)
                    value_bytes = 1 if self._family.towers[part.module].colours else 4
                    size_bytes = value_bytes * math.prod(self._family.array_shape(part.module, media.grid))
                    found[part.module, item] = Wanted(index, media, self._source.shape(index).media_level, size_bytes)
        return found

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the engine takes it from."""
        return tensor.pin_memory() if self._pins else tensor

    def _sends(self, step_plan: StepPlan, module: str, k: int) -> tuple[Transfer, ...]:
        if module != self._seat.module:
            return ()
        llm, tp = self._plan.module(LLM), self._plan.module(module).parallel.tp
        return tuple(
            Transfer(module, peers_of(self._seat, tp, llm, 0, r.llm_dp), self._placed(_index(r.source_rows)))
            for r in routes(step_plan, module, k)
            if r.encoder_dp == self._seat.dp_rank
        )

    def _llm_input(self, step_plan: StepPlan, k: int) -> LlmInput:
        line = Line(pieces(self._plan, step_plan, k, self._seat.dp_rank), self._seat.cp_rank)
        encoders = [m.module for m in self._plan.grid_of(LLM)[:-1]]
        encoded = {name: [owned(of) for of in self._share(step_plan, name, k).of_ranks] for name in encoders}
        concerned = [p.sample for p in line.own]
        for module, of_ranks in encoded.items():
            concerned += [step_plan.of(module).item_sample[item] for item in of_ranks[self._seat.cp_rank]]
        tokens = {p: self._tokens(step_plan.sample_index[p]) for p in dict.fromkeys(concerned)}
        rows, exchanges = self._own_rows(step_plan, encoded, line, tokens)
        found = self._packed_pieces(step_plan, k, line.own, tokens) if line.own else self._llm_filler()
        found = dataclasses.replace(found, num_tokens=line.num_tokens)
        return dataclasses.replace(found, own_rows=rows, row_exchanges=exchanges, keys=line.keys)

    def _packed_pieces(
        self, step_plan: StepPlan, k: int, own: Sequence[Piece], tokens: Mapping[int, EncodedSample]
    ) -> LlmInput:
        samples = [tokens[p.sample] for p in own]
        starts = np.concatenate([[0], np.cumsum([p.end - p.first for p in own])])
        packed = {p.sample: (start, s) for start, p, s in zip(starts, own, samples, strict=False)}
        where, targets, owner = [], [], []
        for start, (position, first, end), sample in zip(starts, own, samples, strict=False):
            following = sample.labels[first + 1 : end + 1]
            (supervised,) = np.nonzero(following != IGNORE_LABEL)
            where.append(supervised + start)
            targets.append(following[supervised])
            owner.append(np.full(len(supervised), position))
        ids = [s.input_ids[p.first : p.end] for p, s in zip(own, samples, strict=True)]
        rope = [
            self._positions(step_plan.sample_index[p.sample], s)[:, p.first : p.end]
            for p, s in zip(own, samples, strict=True)
        ]
        return LlmInput(
            input_ids=self._placed(torch.from_numpy(np.concatenate(ids))),
            position_ids=self._placed(torch.cat(rope, dim=1)),
            cu_seqlens=self._placed(torch.from_numpy(starts.astype(np.int32))),
            transfers=self._receives(step_plan, k, packed),
            loss_where=torch.from_numpy(np.concatenate(where)),
            loss_targets=torch.from_numpy(np.concatenate(targets)),
            loss_sample=torch.from_numpy(np.concatenate(owner)),
            own_rows={},
            row_exchanges={},
            keys=None,
            samples=tuple(p.sample for p in own),
        )

    def _tokens(self, sample_index: int) -> EncodedSample:
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

    def _positions(self, sample_index: int, sample: EncodedSample) -> torch.Tensor:
        stage = self._stages.get(LLM)
        if not isinstance(stage, LlmStage):
            raise TrainError(f"rank {self._seat.rank} was asked for LLM input, but holds `{self._seat.module}`")
        media = [MediaPosition.of(item) for item in self._source.shape(sample_index).items]
        return stage.positions(torch.from_numpy(sample.input_ids), media)

    def _receives(
        self, step_plan: StepPlan, k: int, packed: Mapping[int, tuple[int, EncodedSample]]
    ) -> tuple[Transfer, ...]:
        transfers, tp = [], self._plan.module(LLM).parallel.tp
        for encoder in self._plan.apart:
            work = step_plan.of(encoder.module)
            for route in routes(step_plan, encoder.module, k):
                if route.llm_dp == self._seat.dp_rank:
                    peers = peers_of(self._seat, tp, encoder, encoder.parallel.pp - 1, route.encoder_dp)
                    rows = self._placed(_placeholders(work, route.items, packed))
                    transfers.append(Transfer(encoder.module, peers, rows))
        return tuple(transfers)

    def _own_rows(
        self, step_plan: StepPlan, encoded: Mapping[str, Sequence[Sequence[int]]], line: Line,
        tokens: Mapping[int, EncodedSample],
    ) -> tuple[dict[str, torch.Tensor], dict[str, RowExchange]]:  # fmt: skip
        """Where rows of the encoders with the LLM belong, and how context-parallel ranks exchange them first.

        Args:
            step_plan: The step.
            encoded: Per encoder and rank of the group, items that it hands on.
            line: The group's samples.
            tokens: Of the samples that this rank has a piece of or encodes media of.
        """
        places, exchanges = {}, {}
        for module, of_ranks in encoded.items():
            work = step_plan.of(module)
            if not any(of_ranks):
                continue
            found = [[(work.item_sample[i], work.item_rank_in_sample[i]) for i in items] for items in of_ranks]
            placeholders = [[(s, tokens[s].media_positions[n]) for s, n in items if s in tokens] for items in found]
            where, exchange = line.rows(placeholders)
            places[module] = self._placed(where)
            if len(of_ranks) > 1:
                exchanges[module] = dataclasses.replace(exchange, rows=self._placed(exchange.rows))
        return places, exchanges

    def _filled(self, step_plan: StepPlan, k: int, given: MicrobatchInput | None) -> MicrobatchInput | None:
        """The microbatch with work for every module of the seat's grid that any replica has some for."""
        # In the order of the plan everywhere: it decides in which order gradients are summed.
        names = [m.module for m in self._plan.grid_of(self._seat.module) if any(step_plan.of(m.module).owner[k])]
        if not names:
            return None
        known = given.encoders if given is not None else {}
        encoders = {n: self._filled_encoder(step_plan, n, known.get(n)) for n in names if n != LLM}
        llm = given.llm if given is not None else self._llm_filler() if LLM in names and LLM in self._stages else None
        if llm is not None:
            nothing = torch.zeros(0, dtype=torch.int64)
            llm = dataclasses.replace(
                llm, own_rows={n: llm.own_rows.get(n, nothing) for n in encoders},
                transfers=(*llm.transfers, *self._no_rows(step_plan, k, {t.module for t in llm.transfers})),
                num_tokens=most_tokens(self._plan, step_plan, k, self._seat.replica),
            )  # fmt: skip
        return MicrobatchInput(encoders, llm)

    def _no_rows(self, step_plan: StepPlan, k: int, others: Collection[str]) -> Iterator[Transfer]:
        """Empty rows for encoders that send to other replicas alone, so that embeddings get a gradient."""
        tp, nothing = self._plan.module(LLM).parallel.tp, torch.zeros(0, dtype=torch.int64)
        for m in (m for m in self._plan.apart if m.module not in others and any(step_plan.of(m.module).owner[k])):
            yield Transfer(m.module, peers_of(self._seat, tp, m, m.parallel.pp - 1, 0), nothing)

    def _filled_encoder(self, step_plan: StepPlan, module: str, given: EncoderInput | None) -> EncoderInput:
        """An encoder's part with something to run, where the rank holds layers of it."""
        if given is not None and (given.data is not None or self._seat.part(module) is None):
            return given
        filler = self._encoder_filler(step_plan, module)
        return filler if given is None else dataclasses.replace(filler, num_rows=0, features=given.features)

    def _encoder_filler(
        self, step_plan: StepPlan, module: str, share: EncoderShare | None = None
    ) -> EncoderInput:  # fmt: skip
        """Zeros in the shape of the step's smallest item, with what ranks with parts of a frame exchange meanwhile."""
        work = step_plan.of(module)
        item = min(range(len(work.item_rows)), key=work.item_rows.__getitem__)
        _, media = self._media(step_plan, work, item)
        shape, data = self._family.array_shape(module, media.grid), None
        if self._seat.part(module):
            data = torch.zeros(shape, dtype=self._dtype, pin_memory=self._pins)
            if (filler := self._family.filler(media)) is not None:
                data.copy_(torch.from_numpy(filler))
        sizes = torch.tensor([self._family.item_size(media)])
        frames = share.frames(media) if share is not None else None
        arithmetic = self._arithmetic(module, sizes, whole_frames(media) if frames is not None else ())
        return EncoderInput(data, sizes, arithmetic, work.item_rows[item], (), frames=frames)

    def _llm_filler(self) -> LlmInput:
        stage = self._stages[LLM]
        assert isinstance(stage, LlmStage)
        token, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        return LlmInput(
            input_ids=token, position_ids=stage.positions(token, []),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32), transfers=(), own_rows={}, row_exchanges={},
            keys=None, loss_where=nothing, loss_targets=nothing, loss_sample=nothing,
        )  # fmt: skip


def _placeholders(
    work: ModuleWork, items: Sequence[int], packed: Mapping[int, tuple[int, EncodedSample]]
) -> torch.Tensor:
    """Positions in the packed tokens of the rows of some items, in their order."""
    found = [(item, *packed[work.item_sample[item]]) for item in items]
    positions = [start + of.media_positions[work.item_rank_in_sample[item]] for item, start, of in found]
    return torch.from_numpy(np.concatenate(positions))


def _index(spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(start, end) for start, end in spans])
