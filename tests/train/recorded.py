"""What the engine of every rank of a plan asks for in a step, recorded in one process without models or messages.

Feed and engine are those of training; stages are stand-ins of width 1 that keep only what decides about messages: how
many rows a tensor has, and whether anything trains.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from dflop.data.tokens import EncodedSample
from dflop.models.build import IGNORE_LABEL, EncoderStage
from dflop.models.family import Family
from dflop.models.generic.llm_stage import LlmStage
from dflop.models.ways import Reruns
from dflop.parallel.topology import seats
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.train import context
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.inputs import EncoderInput
from dflop.train.sends import Sends
from dflop.train.stages import _trains
from tests.train.nccl_rules import Call


class Sizes:
    """Samples that have sizes and nothing else."""

    def __init__(self, batch: Sequence[SampleShape]) -> None:
        self._shapes = {shape.sample_index: shape for shape in batch}

    def shape(self, sample_index: int) -> SampleShape:
        return self._shapes[sample_index]

    def tokens(self, sample_index: int) -> EncodedSample:
        shape = self._shapes[sample_index]
        ids, labels = (np.zeros(shape.num_llm_tokens, np.int64) for _ in range(2))
        labels[: len(labels) - shape.num_supervised_tokens] = IGNORE_LABEL
        ends = np.cumsum([0, *(item.num_rows for item in shape.items)])
        return EncodedSample(ids, labels, tuple(np.arange(a, b) for a, b in itertools.pairwise(ends)))

    def array(self, sample_index: int, item: int) -> np.ndarray:
        raise AssertionError("nothing is decoded")


class _NoMedia(Feed):
    def _packed(self, *_: Any) -> torch.Tensor:
        return torch.zeros(0)


class _Llm(LlmStage):
    def __init__(self, trains: bool) -> None:
        torch.nn.Module.__init__(self)
        self.dtype, self.reruns, self.num_rows = torch.float32, Reruns(0), lambda num_tokens: num_tokens
        self._weight = torch.zeros(1, 1, requires_grad=trains)

    def positions(self, ids: torch.Tensor, media: Any) -> torch.Tensor:
        return torch.zeros(1, len(ids))

    def embed(self, ids: torch.Tensor, rows: Sequence[torch.Tensor], where: Any) -> torch.Tensor:
        return sum((group.sum() * 0 for group in rows), self._weight.expand(len(ids), 1))

    def forward(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden + self._weight

    def loss(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden.sum()


class _Encoder(EncoderStage):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.dtype = torch.float32

    def arithmetic(self, sizes: torch.Tensor, parts: Any = ()) -> dict[str, Any]:
        return {}


class _Recorder(Engine):
    """An engine whose messages are calls in a list."""

    def record(self, inputs: Sequence[Any], *, is_training: bool) -> list[Call]:
        self.calls, self._asked = list[Call](), dict[Any, int]()
        with patch("dflop.train.engine.Sends", lambda: _Sends(self.calls)):
            self.run(inputs, num_loss_tokens=1, is_training=is_training)
        return self.calls

    def _act(self, action: Any, *args: Any) -> Any:
        self._action = action
        return super()._act(action, *args)

    def _encode(self, module: str, stage: Any, given: EncoderInput) -> torch.Tensor:
        weight = torch.zeros(1, requires_grad=self._trains_here[module])
        return torch.zeros(given.num_rows, 1) + weight

    def _ask_ahead(self) -> None:
        super()._ask_ahead()
        self.calls.append(Call("compute", message=self._action))  # comes next in forward and backward

    def _post(self, shape: Any, way: Any, *, is_forward: bool) -> None:
        key = is_forward, way.peers.takes_from, way.tag
        if key not in self._asked and shape[0]:
            self._asked[key] = len(self.calls)
            self.calls.append(Call("receive", _group(is_forward), way.peers.takes_from, (way.tag, shape[0])))

    def _receive(self, shape: Any, way: Any, *, is_forward: bool) -> torch.Tensor:
        self._post(shape, way, is_forward=is_forward)
        asked = self._asked.pop((is_forward, way.peers.takes_from, way.tag))
        self.calls.append(Call("wait", message=asked))
        return torch.zeros(shape)

    def _send(self, tensor: torch.Tensor, way: Any, *, is_forward: bool) -> None:
        microbatch, group = self._microbatch(way), _group(is_forward)
        self._sends[is_forward].send(tensor, way.peers, microbatch, group=group, tag=way.tag)


class _Sends(Sends):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def send(self, tensor: Any, peers: Any, microbatch: int, *, group: Any, tag: int) -> None:
        for peer in peers.gives_to:
            number = len(self._calls)
            self._calls.append(Call("send", group, peer, (tag, len(tensor))))
            work = SimpleNamespace(wait=lambda number=number: self._calls.append(Call("wait", message=number)))
            self._held.setdefault(peers, deque()).append((microbatch, work, tensor))


def _group(is_forward: bool) -> str:
    return "forward" if is_forward else "backward"


def recorded(
    plan: Plan, family: Family, batch: Sequence[SampleShape], step_plan: StepPlan, frozen: Collection[str] = (),
    *, is_training: bool = True,
) -> dict[int, list[Call]]:  # fmt: skip
    """By rank, what its engine asks for in a step, or in the forward passes of one alone."""
    trains, source, found = _trains(plan, frozen), Sizes(batch), {}
    with _nothing_exchanged():
        for seat in seats(plan):
            stages = tuple(_Llm(trains[LLM, seat.stage]) if part.module == LLM else _Encoder() for part in seat.parts)
            grid = plan.module(seat.module)
            group = SimpleNamespace(context=object() if grid.parallel.cp > 1 else None)
            model: Any = SimpleNamespace(
                plan=plan, seat=seat, groups=group, device=torch.device("cpu"), stages=stages, trains=trains,
                hidden_size=1, row_width=1,
            )  # fmt: skip
            of = {part.module: stage for part, stage in zip(seat.parts, stages, strict=True)}
            feed = _NoMedia(source, family, plan, seat, of, fills=grid.parameter_shards > 1 or grid.parallel.ep > 1)
            found[seat.rank] = _Recorder(model).record(feed.prepare(step_plan).microbatches, is_training=is_training)
    return found


@contextmanager
def _nothing_exchanged() -> Iterator[None]:
    def all_to_all(rows: torch.Tensor, sent: Any, received: Sequence[int], group: Any) -> torch.Tensor:
        return rows.sum() * 0 + torch.zeros(sum(received), *rows.shape[1:])

    with patch.object(context, "all_to_all", all_to_all):
        yield
