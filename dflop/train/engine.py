"""One step of one rank: run the actions of the stage's order, exchange rows, measure every microbatch.

Both ends of a message know its shape from the StepPlan, so a forward is: receive what is planned, compute, send. The
received tensor is an autograd leaf; its gradient is what travels back, where anything behind it trains. Sends never
block (`dflop/train/sends.py`). Receives are posted while the action before them computes; waiting for one then blocks,
and only the compute between counts as busy. The last stage's loss is the *sum* over supervised tokens divided by the
global count, so gradients of all microbatches and replicas simply add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dflop.errors import DflopError, TrainError
from dflop.models.build import EncoderStage
from dflop.models.generic.llm_stage import LlmStage
from dflop.parallel.exchange import message_device
from dflop.parallel.topology import Peers, SeatPart, peers_of
from dflop.records import LLM
from dflop.simulate.order import Action, actions, num_stages_after, returned
from dflop.train.inputs import EncoderInput, LlmInput, MicrobatchInput
from dflop.train.liveness import Activity
from dflop.train.routes import Crossing, crossings, needs_grad
from dflop.train.sends import Sends
from dflop.train.stages import RankModel, mode
from dflop.train.step_trace import DeviceClock, Mark, StepTrace, sums_of_samples, visit

Shape = tuple[int, int]
"""Rows and width of a message."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How one tensor, or some rows of it, goes to other ranks and its gradient comes back."""

    peers: Peers
    tag: int
    needs_grad: bool
    rows: torch.Tensor | None = None
    """Which rows; None: all."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a stage made, and where it went; the loss went nowhere."""

    tensor: torch.Tensor
    ways: list[_Way]
    trains: bool
    """Whether the module itself trains here, so that a gradient must have something to reach."""


@dataclass(slots=True)
class _InFlight:
    leaves: list[tuple[_Way, torch.Tensor]] = field(default_factory=list)
    outputs: list[_Output] = field(default_factory=list)


class Engine:
    """Runs steps of one seat.

    Args:
        model: What it runs, and its seat.
        activity: Records what the thread that runs steps does.
    """

    def __init__(self, model: RankModel, activity: Activity | None = None) -> None:
        self._plan, self._seat, self._groups, self._device = model.plan, model.seat, model.groups, model.device
        plan, seat, trains = model.plan, model.seat, model.trains
        self._activity = activity or Activity()
        self._parts = list(zip(seat.parts, model.stages, strict=True))
        self._stage_of = {part.module: stage for part, stage in self._parts}
        self._hidden_size, self._row_width = model.hidden_size, model.row_width
        self._dtype = model.stages[0].dtype
        self._number = {m.module: n for n, m in enumerate(plan.modules)}
        grid = plan.module(seat.module)
        self._entering: tuple[Crossing, ...] = crossings(plan, seat, seat.stage, trains)
        self._leaving: tuple[Crossing, ...] = crossings(plan, seat, seat.stage + 1, trains)
        self._rows_need_grad = {e.module: needs_grad(plan, e.module, e.parallel.pp, trains) for e in plan.encoders}
        self._trains_here = {m.module: trains.get((m.module, seat.stage), False) for m in plan.modules}
        tp = grid.parallel.tp
        self._previous = peers_of(seat, tp, grid, seat.stage - 1, seat.replica) if self._entering else None
        self._num_stages_after = num_stages_after(plan, seat.module, seat.stage)
        self._next = peers_of(seat, tp, grid, seat.stage + 1, seat.replica) if self._leaving else None

    def run(
        self, inputs: Sequence[MicrobatchInput | None], *, num_loss_tokens: int,
        before_last_backward: Callable[[], None] = lambda: None, is_training: bool = True,
    ) -> StepTrace:  # fmt: skip
        """Every microbatch, in 1F1B order; gradients are left in `.grad`, not yet reduced.

        Args:
            inputs: One entry per microbatch, None where this rank has no work.
            num_loss_tokens: Supervised tokens of the healthy samples of the whole global batch.
            before_last_backward: Called in front of this rank's last backward pass, if it has one.
            is_training: False runs the forward passes alone, in evaluation mode and without gradients.

        Raises:
            TrainError: naming rank, stage, phase and microbatch.
        """
        self._sends = {is_forward: Sends() for is_forward in (True, False)}
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._of_tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._clock = DeviceClock(self._device)
        self._posted: dict[tuple[bool, int, int], tuple[torch.Tensor, dist.Work]] = {}
        self._is_training = is_training
        # Who sends to this stage has one more stage between itself and the loss.
        self._returned = returned(self._actions(len(inputs), self._num_stages_after + 1))
        own = self._actions(len(inputs), self._num_stages_after)
        todo = [(action, given) for action in own if (given := inputs[action.microbatch]) is not None]
        with mode(self._stage_of.values(), is_training=is_training):
            marked = [
                self._act(action, given, following, num_loss_tokens, before_last_backward)
                for (action, given), following in itertools.zip_longest(todo, todo[1:])
            ]
        self._activity.waits("the last messages it sent")
        for sends in self._sends.values():
            sends.settle_all()
        (end,) = self._clock.read([self._clock.mark()])
        visits = [visit(action, self._clock.read(marks), *moved) for action, marks, *moved in marked]
        losses = torch.stack(list(self._losses.values())).tolist() if self._losses else []  # read at once
        by_microbatch = dict(zip(self._losses, losses, strict=True))
        return StepTrace(by_microbatch, self._clock.started_at_s, end.wall_s, visits, sums_of_samples(self._of_tokens))

    def _actions(self, num_microbatches: int, num_stages_after: int) -> list[Action]:
        """What a stage runs: in evaluation the forward passes of the same order."""
        found = actions(num_microbatches, num_stages_after)
        return [action for action in found if self._is_training or action.phase == "F"]

    def _act(
        self, action: Action, given: MicrobatchInput, following: tuple[Action, MicrobatchInput] | None,
        num_loss_tokens: int, before_last_backward: Callable[[], None],
    ) -> tuple[Action, list[Mark], int, int]:  # fmt: skip
        """One action; its marks, and bytes received and sent."""
        self._next_action = following
        self._received_bytes = self._sent_bytes = 0
        self._marks = [self._clock.mark()]
        try:
            if action.phase == "F":
                self._forward(action.microbatch, given, num_loss_tokens)
            else:
                if following is None:
                    before_last_backward()
                self._backward(action.microbatch)
        except Exception as error:
            raise self._located(error, action) from error
        self._marks.append(self._clock.mark())
        return action, self._marks, self._received_bytes, self._sent_bytes

    def wait(self) -> None:
        """Until the device has done all that this thread gave it; messages may still be on their way."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _located(self, error: Exception, action: Action) -> TrainError:
        """The error with this rank, its stage and the microbatch, which no code below the loop knows."""
        seat = self._seat
        where = f"rank {seat.rank} ({seat.module} stage {seat.stage} replica {seat.replica}), "
        where += f"{'forward' if action.phase == 'F' else 'backward'} of microbatch {action.microbatch}"
        if isinstance(error, DflopError):
            return TrainError(error.what, where=where, hint=error.hint)
        return TrainError(f"{type(error).__name__}: {error}", where=where)

    def _forward(self, k: int, given: MicrobatchInput, num_loss_tokens: int) -> None:
        state = _InFlight()
        self._activity.waits(f"forward of microbatch {k}, what it needs")
        # What crosses from the stage before, and rows of other grids' encoders with where they belong.
        carry = {name: self._receive_leaf(shape, way, state) for name, shape, way in self._carry_ways(k, given)}
        rows = [(self._receive_leaf(shape, way, state), self._here(at)) for at, shape, way in self._row_ways(k, given)]
        self._ask_ahead()
        self._marks.append(self._clock.mark())
        self._activity.works(f"forward of microbatch {k}")
        for part, stage in self._parts:
            if isinstance(stage, LlmStage):
                assert given.llm is not None, "a rank with LLM layers has input"
                carry[LLM] = self._decode(k, part, stage, given.llm, carry, rows, num_loss_tokens)
            elif isinstance(stage, EncoderStage) and part.module in given.encoders:
                carry[part.module] = self._encode(part.module, stage, given.encoders[part.module])
        self._marks.append(self._clock.mark())
        state.outputs = self._ways_out(k, given, carry)
        if self._is_training:
            self._in_flight[k] = state
        for output in state.outputs:
            for way in output.ways:
                whole = output.tensor.detach()
                self._send(whole if way.rows is None else whole.index_select(0, way.rows), way, is_forward=True)
                if not self._is_training:  # no gradient will show that it has arrived
                    self._sends[True].settle(way.peers, k - 1)

    def _encode(self, module: str, stage: EncoderStage, given: EncoderInput) -> torch.Tensor:
        context = self._groups.context
        gathered = given.features.through(context) if given.features is not None and context is not None else None
        if given.data is None:
            assert gathered is not None, "a rank with an encoder has its input"
            out = gathered.exchange(self._no_rows(module))
        else:
            keys = given.frames.through(context, self._device) if given.frames and context is not None else None
            out = stage(self._here(given.data), given.sizes, given.arithmetic, gathered, keys)
        if len(out) != given.num_rows:
            raise TrainError(
                f"`{module}` produced {len(out)} rows, the plan expects {given.num_rows}",
                hint="the family's rule and the Hugging Face module disagree about these item sizes",
            )
        return out

    def _decode(
        self, k: int, part: SeatPart, stage: LlmStage, given: LlmInput, carry: dict[str, torch.Tensor],
        rows: list[tuple[torch.Tensor, torch.Tensor]], num_loss_tokens: int,
    ) -> torch.Tensor:  # fmt: skip
        if part.is_first:
            own = [(self._own_rows(name, given, carry), self._here(where)) for name, where in given.own_rows.items()]
            groups = [*rows, *own]
            hidden = stage.embed(self._here(given.input_ids), [r for r, _ in groups], [w for _, w in groups])
        else:
            hidden = carry[LLM]
        context = self._groups.context
        earlier = given.keys.through(context) if given.keys is not None and context is not None else None
        stage.reruns.num_layers = self._plan.module(LLM).num_rerun(self._seat.stage, given.num_tokens)
        hidden = stage(hidden, self._here(given.position_ids), given.cu_seqlens, earlier, given.counted)
        if not part.is_last:
            result: torch.Tensor = hidden
            return result
        where, targets = self._here(given.loss_where), self._here(given.loss_targets)
        of_tokens = torch.empty(len(targets), device=self._device)
        loss: torch.Tensor = stage.loss(hidden, where, targets, max(num_loss_tokens, 1), of_tokens)
        if self._seat.tp_rank == 0:
            self._losses[k] = loss.detach()
            self._of_tokens.append((given.loss_sample, of_tokens))
        return loss

    def _own_rows(self, module: str, given: LlmInput, carry: dict[str, torch.Tensor]) -> torch.Tensor:
        """An encoder's rows with a place in this rank's tokens, from this rank or its context-parallel group."""
        exchange, context = given.row_exchanges.get(module), self._groups.context
        if exchange is None or context is None:
            return carry.pop(module)[: len(given.own_rows[module])]
        rows = carry.pop(module, None)
        return exchange.run(self._no_rows(module) if rows is None else rows, context)

    def _no_rows(self, module: str) -> torch.Tensor:
        """Empty rows of a rank that encodes nothing and takes part in the others' exchanges, also of gradients."""
        grad = self._rows_need_grad[module]
        return torch.empty((0, self._row_width), dtype=self._dtype, device=self._device, requires_grad=grad)

    def _ways_out(self, k: int, given: MicrobatchInput, carry: dict[str, torch.Tensor]) -> list[_Output]:
        found: list[_Output] = []

        def leave(module: str, ways: list[_Way]) -> None:
            found.append(_Output(carry[module], ways, self._trains_here.get(module, False)))

        for crossing in self._leaving:
            if crossing.module in carry and self._next is not None:
                way = _Way(self._next, self._tag(k, crossing.module), crossing.needs_grad)
                leave(crossing.module, [way] if len(carry[crossing.module]) else [])
        for module, encoder in given.encoders.items():
            if module == self._seat.module:  # on ranks of its own: others are where their rows are needed
                tag, grad = self._tag(k, module), self._rows_need_grad[module]
                # Rows go in their order, so who takes as many as there are takes them as they lie: no copy.
                taken = [(t.peers, None if len(t.rows) == encoder.num_rows else t.rows) for t in encoder.transfers]
                leave(module, [_Way(p, tag, grad, r if r is None else self._here(r)) for p, r in taken])
        llm = self._seat.part(LLM)
        if llm is not None and llm.is_last:
            leave(LLM, [])
        return found

    def _backward(self, k: int) -> None:
        state = self._in_flight.pop(k)
        self._activity.waits(f"backward of microbatch {k}, what it needs")
        gradients = [self._receive_gradient(output.tensor, output.ways) for output in state.outputs]
        self._ask_ahead()
        self._marks.append(self._clock.mark())
        self._activity.works(f"backward of microbatch {k}")
        # Behind some tensors nothing trains: a text through a frozen LLM. Where something must, torch says if not.
        reached = [
            (output.tensor, gradient)
            for output, gradient in zip(state.outputs, gradients, strict=True)
            if output.trains or output.tensor.requires_grad
        ]
        if reached:
            torch.autograd.backward([tensor for tensor, _ in reached], [gradient for _, gradient in reached])
        self._marks.append(self._clock.mark())
        for output in state.outputs:
            for way in output.ways:
                # Its gradient is here. Where none comes back, this keeps a frozen encoder from running far ahead.
                self._sends[True].settle(way.peers, k)
        for way, leaf in state.leaves:
            if way.needs_grad:
                self._send(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf), way, is_forward=False)

    def _carry_ways(self, k: int, given: MicrobatchInput) -> Iterator[tuple[str, Shape, _Way]]:
        for crossing in self._entering:
            shape = self._carry_shape(crossing, given)
            if shape is not None and self._previous is not None:
                way = _Way(self._previous, self._tag(k, crossing.module), crossing.needs_grad)
                yield crossing.module, shape, way

    def _carry_shape(self, crossing: Crossing, given: MicrobatchInput) -> Shape | None:
        """`[rows, width]` of what crosses into this stage; None: the microbatch has nothing of it."""
        if crossing.module == LLM:
            llm = self._stage_of[LLM]
            assert isinstance(llm, LlmStage)
            return None if given.llm is None else (llm.num_rows(len(given.llm.input_ids)), self._hidden_size)
        encoder = given.encoders.get(crossing.module)
        return None if encoder is None else (encoder.num_rows, self._row_width)

    def _row_ways(self, k: int, given: MicrobatchInput) -> Iterator[tuple[torch.Tensor, Shape, _Way]]:
        part = self._seat.part(LLM)
        if given.llm is None or part is None or not part.is_first:
            return
        for transfer in given.llm.transfers:
            way = _Way(transfer.peers, self._tag(k, transfer.module), self._rows_need_grad[transfer.module])
            yield transfer.rows, (len(transfer.rows), self._row_width), way

    def _receive_leaf(self, shape: Shape, way: _Way, state: _InFlight) -> torch.Tensor:
        if not shape[0]:
            return torch.empty(shape, dtype=self._dtype, device=self._device, requires_grad=way.needs_grad)
        leaf = self._receive(shape, way, is_forward=True)
        # Who sent it has been through every backward pass in front of this forward pass.
        self._sends[False].settle(way.peers, self._returned[self._microbatch(way)])
        if way.needs_grad:
            leaf.requires_grad_()
        state.leaves.append((way, leaf))
        return leaf

    def _receive_gradient(self, output: torch.Tensor, ways: list[_Way]) -> torch.Tensor | None:
        """Gradient of an output from wherever it went; None for the loss, and where nobody sends one."""
        wanted = list(_gradient_ways(output, ways))
        if not wanted:
            return None if not output.dim() else torch.zeros_like(output)
        if wanted[0][1].rows is None:
            return self._receive(*wanted[0], is_forward=False)
        gradient = torch.zeros_like(output)
        for shape, way in wanted:
            assert way.rows is not None
            gradient.index_copy_(0, way.rows, self._receive(shape, way, is_forward=False))
        return gradient

    def _ask_ahead(self) -> None:
        """Post what the next action receives, so that it comes while this one computes."""
        if self._next_action is None:
            return
        (phase, k), given = self._next_action
        is_forward, ways = phase == "F", list[tuple[Shape, _Way]]()
        if is_forward:
            ways = [(shape, way) for _, shape, way in (*self._carry_ways(k, given), *self._row_ways(k, given))]
        elif k in self._in_flight:  # else its forward pass is this action, and nothing has been sent for it
            ways = [pair for o in self._in_flight[k].outputs for pair in _gradient_ways(o.tensor, o.ways)]
        # One from each rank: NCCL begins the next one when the first has ended. Streams share the device's queues, and
        # what waits at the head of one holds up what this rank computes, which the first may be waiting for.
        asked = set[int]()
        for shape, way in ways:
            if shape[0] and way.peers.takes_from not in asked:
                asked.add(way.peers.takes_from)
                self._post(shape, way, is_forward=is_forward)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; from page-locked memory the copy is only queued before what uses it."""
        return tensor.to(self._device, non_blocking=True)

    def _tag(self, k: int, module: str) -> int:
        return k * len(self._number) + self._number[module]

    def _microbatch(self, way: _Way) -> int:
        return way.tag // len(self._number)

    def _group(self, is_forward: bool) -> dist.ProcessGroup:
        return self._groups.forward if is_forward else self._groups.backward

    def _post(self, shape: Shape, way: _Way, *, is_forward: bool) -> None:
        key, group = (is_forward, way.peers.takes_from, way.tag), self._group(is_forward)
        if key not in self._posted and shape[0]:
            buffer = torch.empty(shape, dtype=self._dtype, device=message_device(self._device, group))
            work = dist.irecv(buffer, way.peers.takes_from, group=group, tag=way.tag)
            assert work is not None, "this rank is in the group"
            self._posted[key] = buffer, work

    def _receive(self, shape: Shape, way: _Way, *, is_forward: bool) -> torch.Tensor:
        self._post(shape, way, is_forward=is_forward)
        buffer, work = self._posted.pop((is_forward, way.peers.takes_from, way.tag))
        work.wait()
        self._received_bytes += buffer.nbytes
        return buffer.to(self._device)

    def _send(self, tensor: torch.Tensor, way: _Way, *, is_forward: bool) -> None:
        group, sends = self._group(is_forward), self._sends[is_forward]
        tensor = tensor.to(message_device(self._device, group))
        sends.send(tensor, way.peers, self._microbatch(way), group=group, tag=way.tag)
        self._sent_bytes += tensor.nbytes * len(way.peers.gives_to)


def _gradient_ways(output: torch.Tensor, ways: Sequence[_Way]) -> Iterator[tuple[Shape, _Way]]:
    """Messages that an output's gradient comes in: one where all of it went to one, else one from everybody."""
    if any(way.needs_grad for way in ways):
        for way in ways[:1] if ways[0].rows is None else ways:
            yield (output.shape[0] if way.rows is None else len(way.rows), output.shape[1]), way
