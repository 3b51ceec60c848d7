"""Whole models trained in replicas by a plain loop: every microbatch forward and backward, gradients summed once.

The engine runs plans whose modules have their own processes; this uses its stages and inputs without it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dflop.models.build import EncoderStage, LlmStage, cut_stage
from dflop.parallel.topology import seat_of
from dflop.records import LLM, MicrobatchSpan, StepObservation
from dflop.train.feed import EncoderInput, Feed, LlmInput
from tests.bench.schedule.real_cases import Source, family_of
from tests.bench.schedule.real_ranks import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_WARM_UP_STEPS,
    Job,
    prepare_process,
    whole_model,
)
from tests.train.synthetic import make_plan


@dataclass(frozen=True)
class Replicated:
    """What one replica observed."""

    rounds: list[list[StepObservation]]
    """`[round][step]`; a span is a microbatch of the whole model."""
    gradient_error: float
    """Largest difference between gradients of one global batch under two assignments, over the largest gradient."""


def train_replicas(rank: int, folder: Path, job: Job) -> Replicated:
    """One rank that holds the whole model."""
    prepare_process(rank)
    replica = _Replica(rank, job)
    first = [i for i, p in enumerate(job.step_plans) if p.sample_index == job.step_plans[0].sample_index]
    gradients = [replica.gradient(i) for i in first]
    error = max(float((g - gradients[0]).abs().max() / gradients[0].abs().max()) for g in gradients[1:])
    steps = range(len(job.step_plans))
    for i in steps[:NUM_WARM_UP_STEPS]:
        replica.step(i)
    return Replicated([[replica.step(i) for i in steps] for _ in range(job.num_rounds)], error)


class _Replica:
    """One rank of a data-parallel job, ready to train its steps."""

    def __init__(self, rank: int, job: Job) -> None:
        family = family_of(job.case.model)
        # A model each: cutting the decoder out takes from the model what the encoder needs.
        encoder, llm = (
            cut_stage(whole_model(job.case.model), family, s.module, (0, s.num_layers)) for s in family.specs()
        )
        assert isinstance(encoder, EncoderStage)
        assert isinstance(llm, LlmStage)
        self._rank, self._job, self._encoder, self._llm = rank, job, encoder, llm
        self._parameters = [p for s in (encoder, llm) for p in s.names.values()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE)
        # The owners of an inline plan are those of a plan where encoder and LLM of a replica are two processes.
        plan = make_plan({"vision": (1, 2), LLM: (1, 2)}, num_microbatches=job.case.num_microbatches, of=family)
        source = Source(job.case.model, job.shapes)
        encoder_feed, llm_feed = (Feed(source, family, plan, seat_of(plan, r), llm) for r in (rank, 2 + rank))
        self._inputs = [
            list(zip(encoder_feed.prepare(p).microbatches, llm_feed.prepare(p).microbatches, strict=True))
            for p in job.step_plans
        ]

    def gradient(self, step: int) -> torch.Tensor:
        """The summed gradient of a step, flat; no update."""
        for encoder_input, llm_input in self._inputs[step]:
            if llm_input is not None:
                self._forward(encoder_input, llm_input, step).backward()
        flat = self._reduced()
        self._optimizer.zero_grad(set_to_none=True)
        return flat

    def step(self, index: int) -> StepObservation:
        """One optimizer step, begun by both ranks together; a rank waits for the other in the reduction."""
        dist.barrier()
        started = time.perf_counter()
        spans, loss = [], 0.0
        for k, (encoder_input, llm_input) in enumerate(self._inputs[index]):
            if llm_input is None:
                continue
            begun = time.perf_counter(), time.thread_time()
            share = self._forward(encoder_input, llm_input, index)
            between = time.perf_counter(), time.thread_time()
            share.backward()
            ended = time.perf_counter(), time.thread_time()
            loss += float(share.detach())
            spans.append(_span(k, started, begun, between, ended))
        computed = time.perf_counter()
        flat = self._reduced()
        reduced = time.perf_counter()
        norm = float(flat.norm())
        scale = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        for p, part in zip(self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True):
            p.grad = part.view_as(p).mul_(scale)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        done, plan = time.perf_counter(), self._job.step_plans[index]
        return StepObservation(
            run_id="bench", attempt=0, step=index, policy=plan.policy, rank=self._rank, module=LLM, stage=0,
            dp_rank=self._rank, predicted_step_s=plan.predicted_step_s, step_s=done - started,
            busy_s=sum(s.forward_s + s.backward_s for s in spans), data_wait_s=0.0, schedule_wait_s=0.0,
            reduce_s=reduced - computed, optimizer_s=done - reduced, loss=loss, grad_norm=norm,
            num_supervised_tokens=plan.num_supervised_tokens, observed_at_s=time.time(), spans=tuple(spans),
        )  # fmt: skip

    def _forward(self, encoder_input: EncoderInput | None, llm_input: LlmInput, step: int) -> torch.Tensor:
        """This microbatch's share of the mean loss over the supervised tokens of the whole global batch."""
        rows, where = [], []
        if encoder_input is not None:
            (sent,), (received,) = encoder_input.transfers, llm_input.transfers
            rows = [self._encoder(encoder_input.data, encoder_input.sizes).index_select(0, sent.rows)]
            where = [received.rows]
        hidden = self._llm.embed(llm_input.input_ids, rows, where)
        hidden = self._llm(hidden, llm_input.position_ids, llm_input.cu_seqlens)
        total = self._llm.loss_sum(hidden, llm_input.loss_where, llm_input.loss_targets)
        return total / self._job.step_plans[step].num_supervised_tokens

    def _reduced(self) -> torch.Tensor:
        """Gradients of all parameters in one tensor, summed over the replicas."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        return flat


def _span(
    k: int, started: float, begun: tuple[float, float], between: tuple[float, float], ended: tuple[float, float]
) -> MicrobatchSpan:
    """A microbatch from its (wall, thread CPU) clock readings."""
    forward_s, forward_compute_s = (b - a for a, b in zip(begun, between, strict=True))
    backward_s, backward_compute_s = (b - a for a, b in zip(between, ended, strict=True))
    return MicrobatchSpan(
        k, 0, 0, 0, 0.0, 0.0, begun[0] - started, forward_s, between[0] - started, backward_s,
        forward_compute_s, backward_compute_s,
    )  # fmt: skip
