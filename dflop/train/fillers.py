"""Something to run for replicas that have no work in a microbatch in which others have.

Where replicas share out parameters (`fsdp.py`) they gather a module's weights and sum its gradients together, so all of
them must run it or none. Who has nothing encodes zeros in the shape of the step's smallest item, or decodes one token,
and nobody takes what comes of it: no row of it reaches a sample and no token carries loss, so its gradients are zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from dflop.models.build import LlmStage, Stage
from dflop.models.family import Family
from dflop.parallel.topology import Seat
from dflop.records import LLM, Plan, StepPlan
from dflop.train.inputs import EncoderInput, LlmInput, MicrobatchInput, PreparedStep, SampleSource


class Fillers:
    """Fills the gaps in one seat's input.

    Args:
        source: Shapes of samples.
        family: Shapes of encoder inputs.
        plan: The layout.
        seat: This rank's place.
        stages: The rank's own, by module.
    """

    def __init__(
        self, source: SampleSource, family: Family, plan: Plan, seat: Seat, stages: Mapping[str, Stage]
    ) -> None:
        self._source, self._family, self._plan, self._seat = source, family, plan, seat
        self._llm_stage = stages.get(LLM)

    def fill(self, prepared: PreparedStep) -> PreparedStep:
        """The step with work for every module of the seat's grid wherever any replica has some."""
        step_plan = prepared.step_plan
        inputs = (self._filled(step_plan, k, given) for k, given in enumerate(prepared.microbatches))
        return dataclasses.replace(prepared, microbatches=tuple(inputs))

    def _filled(self, step_plan: StepPlan, k: int, given: MicrobatchInput | None) -> MicrobatchInput | None:
        # In the order of the plan everywhere: it decides in which order gradients are summed.
        names = [m.module for m in self._plan.modules if self._plan.is_inline or m.module == self._seat.module]
        names = [name for name in names if any(step_plan.of(name).owner[k])]
        if not names:
            return None
        known = given.encoders if given is not None else {}
        encoders = {n: known.get(n) or self._encoder_input(step_plan, n) for n in names if n != LLM}
        llm = given.llm if given is not None else self._llm_input() if LLM in names and self._llm_stage else None
        if llm is not None and self._plan.is_inline:
            nothing = torch.zeros(0, dtype=torch.int64)
            llm = dataclasses.replace(llm, own_rows={n: llm.own_rows.get(n, nothing) for n in encoders})
        return MicrobatchInput(encoders, llm)

    def _encoder_input(self, step_plan: StepPlan, module: str) -> EncoderInput:
        work, part = step_plan.of(module), self._seat.part(module)
        item = min(range(len(work.item_rows)), key=work.item_rows.__getitem__)
        index = step_plan.sample_index[work.item_sample[item]]
        media = self._source.shape(index).items[work.item_rank_in_sample[item]]
        is_first = part is not None and part.is_first
        data = torch.zeros(self._family.array_shape(module, media.grid)) if is_first else None
        return EncoderInput(data, torch.tensor([self._family.item_size(media)]), None, work.item_rows[item], ())

    def _llm_input(self) -> LlmInput:
        assert isinstance(self._llm_stage, LlmStage)
        token, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        return LlmInput(
            input_ids=token,
            position_ids=self._llm_stage.positions(token, []),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            transfers=(),
            own_rows={},
            loss_where=nothing,
            loss_targets=nothing,
            loss_sample=nothing,
        )
