"""One optimizer step of one rank: run the stage's 1F1B actions, exchange rows, measure every microbatch.

Both ends of a message know its shape from the StepPlan, so a forward is: receive what is planned, compute, send. The
received tensor is an autograd leaf; its gradient is what travels back. Sends never block and are held until the end of
the step; receives block, and only the compute between them counts as busy. The last stage's loss is the *sum* over
supervised tokens divided by the global count, so gradients of all microbatches and replicas simply add up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dflop.errors import DflopError, TrainError
from dflop.models.build import EncoderStage, LlmStage, Stage
from dflop.parallel.topology import Groups, Seat, rank_of
from dflop.records import LLM, Plan
from dflop.simulate.order import Action, one_f_one_b
from dflop.simulate.step import num_stages_after
from dflop.train.feed import EncoderInput, LlmInput, MicrobatchInput


@dataclass(slots=True)
class Timing:
    """One microbatch on this stage: wall seconds from the start of the step, and compute seconds.

    Where processes share cores, compute is thread CPU time, which waiting for a core does not inflate; on a GPU the
    two are equal.
    """

    forward_start_s: float = 0.0
    forward_s: float = 0.0
    backward_start_s: float = 0.0
    backward_s: float = 0.0
    forward_compute_s: float = 0.0
    backward_compute_s: float = 0.0


@dataclass(slots=True)
class StepTrace:
    """What `Engine.run` measured."""

    loss: float
    """This rank's share of the global mean loss; 0 off the last LLM stage."""
    timings: dict[int, Timing]
    """Microbatches this rank had work in."""

    @property
    def busy_s(self) -> float:
        return sum(t.forward_s + t.backward_s for t in self.timings.values())


@dataclass(slots=True)
class _InFlight:
    output: torch.Tensor
    leaves: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(peer, received tensor); each leaf's gradient goes back to its peer."""


class Engine:
    """Runs steps of one seat.

    Args:
        plan: The layout, the same on every rank.
        seat: This rank's place.
        stage: The cut module.
        groups: Process groups.
        device: Where the stage lives.
        hidden_size: Width of what LLM stages hand on.
    """

    def __init__(
        self, plan: Plan, seat: Seat, stage: Stage, groups: Groups, device: torch.device, hidden_size: int
    ) -> None:
        self._plan, self._seat, self._stage, self._groups = plan, seat, stage, groups
        self._device, self._hidden_size = device, hidden_size
        self._row_width = stage.row_width if isinstance(stage, LlmStage) else hidden_size
        self._dtype = next(iter(stage.names.values())).dtype
        llm = plan.module(LLM)
        is_llm = seat.module == LLM
        self._previous = rank_of(llm, seat.stage - 1, seat.dp_rank) if is_llm and seat.stage > 0 else None
        more = is_llm and seat.stage < llm.parallel.pp - 1
        self._next = rank_of(llm, seat.stage + 1, seat.dp_rank) if more else None

    def run(self, inputs: Sequence[MicrobatchInput], *, healthy: torch.Tensor, num_loss_tokens: int) -> StepTrace:
        """Forward and backward of every microbatch; gradients are left in `.grad`, not yet reduced.

        Args:
            inputs: One entry per microbatch, None where this rank has no work.
            healthy: bool `[global batch]`; samples that are False carry no loss.
            num_loss_tokens: Supervised tokens of the healthy samples of the whole global batch.

        Raises:
            TrainError: naming rank, stage, phase and microbatch.
        """
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._loss = 0.0
        self._start_s = 0.0
        self._start_s, _ = self._now()
        timings = {k: Timing() for k, x in enumerate(inputs) if x is not None}
        for action in one_f_one_b(len(inputs), num_stages_after(self._plan, self._seat.module, self._seat.stage)):
            given = inputs[action.microbatch]
            if given is None:
                continue
            try:
                if action.phase == "F":
                    self._forward(action.microbatch, given, healthy, num_loss_tokens, timings[action.microbatch])
                else:
                    self._backward(action.microbatch, given, timings[action.microbatch])
            except Exception as error:
                raise self._located(error, action) from error
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        return StepTrace(self._loss, timings)

    def _located(self, error: Exception, action: Action) -> TrainError:
        """The error with this rank, its stage and the microbatch, which no code below the loop knows."""
        seat = self._seat
        where = f"rank {seat.rank} ({seat.module} stage {seat.stage} replica {seat.dp_rank}), "
        where += f"{'forward' if action.phase == 'F' else 'backward'} of microbatch {action.microbatch}"
        if isinstance(error, DflopError):
            return TrainError(error.what, where=where, hint=error.hint)
        return TrainError(f"{type(error).__name__}: {error}", where=where)

    def _forward(
        self, k: int, given: EncoderInput | LlmInput, healthy: torch.Tensor, num_loss_tokens: int, timing: Timing
    ) -> None:
        leaves = self._receive_inputs(k, given)
        timing.forward_start_s, compute_s = self._now()
        if isinstance(given, EncoderInput):
            output = self._encode(given)
        else:
            output = self._decode(given, leaves, healthy, num_loss_tokens)
        timing.forward_s, timing.forward_compute_s = self._since(timing.forward_start_s, compute_s)
        self._in_flight[k] = _InFlight(output, leaves)
        if isinstance(given, EncoderInput):
            for transfer in given.transfers:
                self._send(output.detach().index_select(0, transfer.rows.to(self._device)), transfer.peer, k, True)
        elif self._next is not None:
            self._send(output.detach(), self._next, k, True)

    def _encode(self, given: EncoderInput) -> torch.Tensor:
        stage = self._stage
        if not isinstance(stage, EncoderStage):
            raise TypeError(f"encoder input on {type(stage).__name__}")
        rows: torch.Tensor = stage(given.data.to(self._device, self._dtype), given.sizes.to(self._device))
        planned = sum(len(t.rows) for t in given.transfers)
        if len(rows) != planned:
            raise TrainError(
                f"`{self._seat.module}` produced {len(rows)} rows where the plan promised {planned}",
                hint="the family's rule and the Hugging Face module disagree about these item sizes",
            )
        return rows

    def _decode(
        self,
        given: LlmInput,
        leaves: list[tuple[int, torch.Tensor]],
        healthy: torch.Tensor,
        num_loss_tokens: int,
    ) -> torch.Tensor:
        stage = self._stage
        if not isinstance(stage, LlmStage):
            raise TypeError(f"LLM input on {type(stage).__name__}")
        if stage.is_first:
            positions = [t.rows.to(self._device) for t in given.transfers]
            hidden = stage.embed(given.input_ids.to(self._device), [leaf for _, leaf in leaves], positions)
        else:
            hidden = leaves[0][1]
        hidden = stage(hidden, given.position_ids.to(self._device), given.cu_seqlens.to(self._device))
        if not stage.is_last:
            result: torch.Tensor = hidden
            return result
        kept = healthy[given.loss_sample]
        where, targets = given.loss_where[kept].to(self._device), given.loss_targets[kept].to(self._device)
        loss: torch.Tensor = stage.loss_sum(hidden, where, targets) / max(num_loss_tokens, 1)
        self._loss += float(loss.detach())
        return loss

    def _backward(self, k: int, given: EncoderInput | LlmInput, timing: Timing) -> None:
        state = self._in_flight.pop(k)
        gradient = self._receive_gradient(k, given, state.output)
        timing.backward_start_s, compute_s = self._now()
        torch.autograd.backward(state.output, gradient)
        timing.backward_s, timing.backward_compute_s = self._since(timing.backward_start_s, compute_s)
        for peer, leaf in state.leaves:
            self._send(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf), peer, k, False)

    def _receive_inputs(self, k: int, given: EncoderInput | LlmInput) -> list[tuple[int, torch.Tensor]]:
        if isinstance(given, EncoderInput):
            return []
        if self._previous is not None:
            expected, width = [(self._previous, len(given.input_ids))], self._hidden_size
        else:
            expected, width = [(t.peer, len(t.rows)) for t in given.transfers], self._row_width
        leaves = [(peer, self._receive(num_rows, width, peer, k, True)) for peer, num_rows in expected]
        for _, leaf in leaves:
            leaf.requires_grad_()
        return leaves

    def _receive_gradient(self, k: int, given: EncoderInput | LlmInput, output: torch.Tensor) -> torch.Tensor | None:
        if isinstance(given, EncoderInput):
            gradient = torch.zeros_like(output)
            for transfer in given.transfers:
                rows = self._receive(len(transfer.rows), output.shape[1], transfer.peer, k, False)
                gradient.index_copy_(0, transfer.rows.to(self._device), rows)
            return gradient
        if self._next is not None:
            return self._receive(len(given.input_ids), self._hidden_size, self._next, k, False)
        return None

    def _receive(self, num_rows: int, width: int, peer: int, k: int, is_forward: bool) -> torch.Tensor:
        buffer = torch.empty(num_rows, width, dtype=self._dtype, device=self._device)
        dist.recv(buffer, peer, group=self._groups.forward if is_forward else self._groups.backward, tag=k)
        return buffer

    def _send(self, tensor: torch.Tensor, peer: int, k: int, is_forward: bool) -> None:
        tensor = tensor.contiguous()
        group = self._groups.forward if is_forward else self._groups.backward
        # Kept until the step ends: the buffer must outlive the asynchronous send.
        self._sends.append((dist.isend(tensor, peer, group=group, tag=k), tensor))

    def _now(self) -> tuple[float, float]:
        """(seconds since the step began, compute seconds of this thread)."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            now_s = time.perf_counter()
            return now_s - self._start_s, now_s
        return time.perf_counter() - self._start_s, time.thread_time()

    def _since(self, start_s: float, compute_s: float) -> tuple[float, float]:
        now_s, now_compute_s = self._now()
        return now_s - start_s, now_compute_s - compute_s
